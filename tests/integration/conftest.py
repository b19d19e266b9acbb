"""Real engines over the simulated NPU. Launching a pair takes half a minute, so tests of one pair share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from align.run import guardian
from tests.integration.support import alive


@pytest.fixture(autouse=True, scope="session")
def _nothing_left_behind() -> Iterator[None]:
    """Whatever a test starts carries a run's mark, and nothing with a mark outlives the tests."""
    yield
    mark = guardian.MARK.encode() + b"="
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue  # not ours, or just ended
            if mark in environ:
                left.append(int(entry.name))
    assert not alive(left), f"processes of a run are left: {alive(left)}"
