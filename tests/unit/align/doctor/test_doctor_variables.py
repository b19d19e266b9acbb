"""Variables that an engine reads."""

from __future__ import annotations

from pathlib import Path

from align.doctor.types import Needs
from align.doctor.variables import examine, variables
from envs.profiles import resolve
from tests.unit.align.doctor.fakes import machine


def test_variables(tmp_path: Path) -> None:
    (none,) = examine(machine(tmp_path), Needs())
    assert none.state == "ok"
    found = variables({"VLLM_USE_V1": "1", "RAY_memory_usage_threshold": "1", "HOME": "/", "VLLM_PYTHON": "/p"})
    assert (found.state, found.mend) == ("warning", "unset RAY_memory_usage_threshold VLLM_USE_V1")


def test_what_a_run_sets_itself_is_not_the_users() -> None:
    """The profile's own values win over inherited ones."""
    from unittest import mock

    from envs.build import Builder

    with mock.patch.object(Builder, "ensure", lambda self, name, progress=None: self.environment(name)):
        ours = {name: value for engine in ("lmdeploy", "vllm") for name, value in resolve("simnpu", engine).env.items()}
    assert {"VLLM_VERSION", "LMDEPLOY_SKIP_WARMUP"} <= ours.keys()
    assert variables(ours).state == "ok"
