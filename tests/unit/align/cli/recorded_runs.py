"""Runs that nobody launched: two sides that were scripted, and an engine that records nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from align.run import alone, certify, offline
from align.run.flow import Flow, Wishes
from align.run.outcome import Outcome, SideOutcome
from align.run.stability import Stability
from tests.unit.align.compare import traces
from tests.unit.align.run import recordings

#: Runs ``align …``; answers ``(exit code, output, errors)``.
Align = Callable[..., tuple[int, str, str]]


def make_run(directory: Path, monkeypatch: pytest.MonkeyPatch, edit: traces.Edit | None = None, **wishes: Any) -> Path:
    for module in (certify, offline):
        monkeypatch.setattr(module, "evaluate", lambda *_, **__: (recordings.condition(),))
    monkeypatch.setattr(certify, "file_hashes", lambda path: {"model.safetensors": "00"})
    session: Any = recordings.Scripted(directory)
    if edit is not None:
        session.edits["candidate"] = edit
    Flow(session, recordings.case(), recordings.info(), Wishes(**wishes)).run()
    return directory


class FakeAlone:
    """Records nothing; remembers how it was asked."""

    made: list[FakeAlone]
    error: Exception | None = None

    def __init__(
        self, session: Any, case: Any, info: Any, directory: Path, budget: int, values: Any = (), lean: bool = False
    ) -> None:
        self.lean = lean
        self.session, self.case, self.directory, self.budget, self.values = session, case, directory, budget, values
        self.made.append(self)

    def run(self, along: Any = None) -> alone.Recorded:
        self.along = along
        if self.error is not None:
            raise self.error
        found = (recordings.condition("ok", "eager"), recordings.condition("unknown", "warmup"))
        return alone.Recorded(("embed",), 1, 2, 3, 4, 5000, Stability("candidate", 4, None, 0.0), found)


class FakeSession:
    def __init__(self, case: Any, info: Any, interpreters: Any, directory: Path, *rest: Any, **more: Any) -> None:
        self.interpreters, self.extras, self.more = interpreters, rest[-1], more
        self.outcome = Outcome({role: SideOutcome("x") for role in interpreters})
