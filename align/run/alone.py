"""One engine by itself: it must repeat its own tokens, then its workers record while it follows given ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adapters.base import Generation
from align.case.schema import Case
from align.compare.rows import real_steps
from align.conditions import Condition
from align.models.info import ModelInfo
from align.run.arguments import keep_arguments
from align.run.audit import keep_records
from align.run.certify import Certifier
from align.run.collectives import keep_calls
from align.run.flow import check_recordable
from align.run.manifest import manifest, write_manifest
from align.run.recording import check_lean, first_look
from align.run.session import Session
from align.run.stability import Stability, refuse_unstable, stability
from align.run.traces import open_trace, trace_bytes


@dataclass(frozen=True)
class Recorded:
    """What a recording holds.

    Attributes:
        checkpoints: names of which anything was recorded, in the model's order.
        values: how many of them have their values.
        expected: how many the model has.
        steps, rows: real steps and their rows, of the first rank.
        bytes: of all files of the records.
        stable: whether the engine repeats itself.
        conditions: as far as one side can tell; they are judged when two recordings are compared.
    """

    checkpoints: tuple[str, ...]
    values: int
    expected: int
    steps: int
    rows: int
    bytes: int
    stable: Stability
    conditions: tuple[Condition, ...] = ()


class Alone:
    """Records one engine.

    Args:
        session: of one side, not yet entered.
        directory: of the trace; exists.
        budget: bytes of values.
        values: patterns of checkpoints whose values are kept; empty leaves it to the budget.
        lean: record as little as still names a fault.
    """

    def __init__(
        self,
        session: Session,
        case: Case,
        info: ModelInfo,
        directory: Path,
        budget: int,
        values: Sequence[str] = (),
        lean: bool = False,
    ) -> None:
        (self._role,) = session.roles
        self._session, self._case, self._info, self._directory = session, case, info, directory
        self._budget, self._values, self._lean = budget, tuple(values), lean
        tp = case.at(self._role).layout.tp
        check_lean(lean, tp)
        self._structure = check_recordable(info, tp)

    def run(self, along: tuple[Generation, ...] | None = None) -> Recorded:
        """Record along the engine's own tokens or others.

        Raises:
            UserError: the engine does not repeat itself.
            SideError: it failed.
        """
        session, role = self._session, self._role
        with session:
            session.launch()
            session.generate()
            session.observe()
            certifier = Certifier(self._case, self._info, self._structure, ())
            conditions = certifier.judge(session.outcome.sides, ran=True)
            session.generate_again()
            side = session.outcome.sides[role]
            assert side.free is not None and side.again is not None
            stable = stability(role, side.free.generations, side.again.generations)
            refuse_unstable([stable])
            followed = side.free.generations if along is None else along
            requests = session.forced(followed)
            look = first_look(self._directory, self._structure, requests, self._budget, self._values, self._lean)
            session.replay(followed, {role: look})
            content = manifest(
                role,
                self._case,
                self._info,
                side,
                work_dir=session.directories[role],
                checkpoint_files=certifier.files(self._info.path),
                stable=stable,
            )
            keep_records(session.directories[role], self._directory)
            keep_calls(session.directories[role], self._directory)
            keep_arguments(session.directories[role], self._directory)
            write_manifest(self._directory, content)
        return self._recorded(stable, conditions)

    def _recorded(self, stable: Stability, conditions: tuple[Condition, ...]) -> Recorded:
        trace = open_trace(self._directory)
        try:
            real = real_steps(trace)
            seen = {key for entry in real for key in trace.keys(trace.ranks_of(entry.step)[0], entry.step)}
        finally:
            trace.close()
        names = [str(name) for name in self._structure.names()]
        about = {key.partition("#")[0] for key in seen}
        return Recorded(
            checkpoints=tuple(name for name in names if name in about),
            values=sum(1 for name in names if name in seen),
            expected=len(names),
            steps=len(real),
            rows=sum(span.count for entry in real for span in entry.rows),
            bytes=trace_bytes(self._directory),
            stable=stable,
            conditions=conditions,
        )
