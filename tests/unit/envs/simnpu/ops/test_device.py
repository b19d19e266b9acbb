"""The operators as torch dispatches them, on npu tensors, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch_npu._sim import registry

SCRIPT = Path(__file__).with_name("device_session.py")
#: Those that need a process group are called by expert_checks.py.
TOGETHER = {"npu::npu_moe_distribute_combine_v2", "npu::npu_moe_distribute_dispatch_v2"}
OPERATORS = sorted(registry.load_operators().keys() - TOGETHER)


def run(simnpu_path: Path, fault: str = "", *cases: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ALIGN_SIMNPU_")}
    environment |= {"PYTHONPATH": str(simnpu_path), "OMP_NUM_THREADS": "1"}
    if fault:
        environment["ALIGN_SIMNPU_FAULT"] = fault
    command = [sys.executable, str(SCRIPT), *cases]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def report(simnpu_path: Path) -> dict[str, Any]:
    """What device_session.py reports without a fault."""
    done = run(simnpu_path)
    assert done.returncode == 0, done.stderr
    assert "WRONG ON PURPOSE" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_operator_is_called(report: dict[str, Any]) -> None:
    assert report["cases"] == OPERATORS


@pytest.mark.parametrize("qualified", OPERATORS)
def test_the_registered_operator_does_what_the_function_does(report: dict[str, Any], qualified: str) -> None:
    compared = report["compared"][qualified]
    assert compared == {"values": True, "in place": True, "on the device": True, "identity": True}
    assert report["calls"][qualified] == 1


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "host argument",
            "RuntimeError: Expected all tensors to be on the same device, but argument 'gamma' of npu::",
        ),
        (
            "host mask",
            "RuntimeError: Expected all tensors to be on the same device, but argument 'atten_mask'",
        ),
        ("host only", "NotImplementedError: Could not run 'npu::npu_rms_norm'"),
        (
            "unsimulated",
            "UnsimulatedOperator: the simulated NPU has no numerics for npu::npu_moe_re_routing, signature",
        ),
        (
            "unsimulated without tensors",
            "UnsimulatedOperator: the simulated NPU has no numerics for npu::empty_with",
        ),
        ("unsimulated out", "no numerics for npu::npu_fused_infer_attention_score.out"),
        ("lengths on the device", "no error"),
        ("check", "RuntimeError: npu::npu_swiglu: input is shape (3, 7)"),
    ],
)
def test_messages(report: dict[str, Any], case: str, words: str) -> None:
    assert words in report["messages"][case]


def test_an_unsimulated_operator_says_where_to_add_it(report: dict[str, Any]) -> None:
    message = report["messages"]["unsimulated"]
    assert "npu::npu_moe_re_routing(Tensor tokens, Tensor expert_token_num_per_rank, *" in message
    assert "envs/simnpu/path/torch_npu/_sim/ops/" in message


def test_a_later_definition_of_the_same_name_is_ignored(report: dict[str, Any]) -> None:
    assert report["redefined"] == "npu_add_rms_norm_bias"
    assert report["defined"] == "invented_by_a_test"


def test_attributes_of_torch_npu(report: dict[str, Any]) -> None:
    expected = {"npu_swiglu": True, "_npu_rotary_embedding": True, "npu_moe_re_routing": True}
    assert report["attributes"] == expected | {"get_masked_input_and_mask": False, "empty_with_format": False}
    assert report["same"]
    assert report["keywords"]


@pytest.mark.parametrize("qualified", ["npu::npu_swiglu", "atb::_npu_paged_attention", "atb::_npu_reshape_and_cache"])
def test_a_fault_is_seen_and_announced(simnpu_path: Path, qualified: str) -> None:
    untouched = "npu::npu_silu"
    done = run(simnpu_path, f"{qualified}:scale=1.5", qualified, untouched)
    assert done.returncode == 0, done.stderr
    announced = [line for line in done.stderr.splitlines() if "WRONG ON PURPOSE" in line]
    assert len(announced) == 1
    assert f"{qualified} * 1.5" in announced[0]
    compared = json.loads(done.stdout.splitlines()[-1])["compared"]
    assert not (compared[qualified]["values"] and compared[qualified]["in place"])
    assert all(compared[untouched].values())


def test_an_unknown_fault_stops_the_import(simnpu_path: Path) -> None:
    done = run(simnpu_path, "npu_invented:scale=2", "npu::npu_silu")
    assert done.returncode != 0
    assert "ALIGN_SIMNPU_FAULT names 'npu_invented'" in done.stderr
