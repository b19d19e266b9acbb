"""Real engines over the simulated NPU. Launching a pair takes half a minute, so tests of one pair share it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.support import alive


@pytest.fixture(autouse=True, scope="session")
def _nothing_left_behind() -> Iterator[None]:
    """Whatever these tests start inherits a mark of theirs, and nothing but themselves outlives them with it."""
    mark = f"ALIGN_TEST_RUN={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    os.environ[name] = value
    yield
    del os.environ[name]
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue  # not ours, or just ended
            if mark.encode() in environ.split(b"\0"):
                left.append(int(entry.name))
    assert not alive(left), f"processes of a run are left: {alive(left)}"
