"""transfer_to_npu: code written for cuda runs on npu."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.envs.simnpu import session

SCRIPT = Path(__file__).with_name("transfer_checks.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return session.run(SCRIPT, env={"STORE": f"file://{tmp_path_factory.mktemp('store') / 'store'}"})


@pytest.mark.parametrize("name", session.names(SCRIPT))
def test_transfer(report: dict[str, str], name: str) -> None:
    assert not report[name], report[name]


def test_nothing_is_changed_without_the_import() -> None:
    done = session.python(
        "-c", "import torch; print(torch.cuda.is_available(), hasattr(torch.cuda, 'CUDAGraph') and "
        "torch.cuda.CUDAGraph.__module__)",
    )  # fmt: skip
    assert done.stdout.startswith("False"), done.stdout + done.stderr
    assert "torch_npu" not in done.stdout
