"""The driver's half of the clean-up, with real processes."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from align.run.guard import Guard
from tests.unit.align.run import processes


@pytest.mark.parametrize("killed", [False, True])
def test_closing_ends_everything_also_without_the_guardian(killed: bool) -> None:
    run_id = uuid.uuid4().hex
    guard = Guard(run_id)
    child, _ = processes.python(processes.STUBBORN, run_id)
    (Path(guard.temp_dir) / "socket").touch()
    try:
        if killed:
            guard.process.kill()
            assert processes.wait_until(lambda: not processes.is_alive(guard.process.pid))
        guard.close()
        assert processes.wait_until(lambda: not processes.is_alive(child.pid), 2.0)
        assert not Path(guard.temp_dir).exists()
    finally:
        child.kill()
        child.wait()
        guard.close()
