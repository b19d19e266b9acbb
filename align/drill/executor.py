"""Runs trials: engines of one setting stay up, each trial is one whole run in them, and one bad trial ends no other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from align.case.schema import Case
from align.drill.benign import patch_of
from align.drill.campaign import Work
from align.drill.library import Engine, Fault
from align.drill.live import LivePair
from align.drill.score import Score, score
from align.drill.settings import Setting, case_of
from align.drill.trials import Trial, patch_text
from align.errors import UserError
from align.findings import Finding
from align.models.info import ModelInfo
from align.run.flow import Flow, Wishes
from align.run.plan import SideExtras
from align.run.report import Report
from align.run.session import Session
from align.run.side import Limits
from envs.profiles import Interpreter

#: Trials after which a pair is launched anew: logs of steps grow, and are read whole.
_TRIALS_OF_A_PAIR = 60
#: Conditions about what the engines were given.
_INPUTS = ("token_ids",)
#: Findings that are kept of a trial.
_KEPT = 3


@dataclass(frozen=True)
class Told:
    """What was said of a trial.

    Attributes:
        verdict: ``aligned``, ``diverged`` or ``not comparable``.
        findings: the first ones; of a run that was refused, its conditions (:func:`refused`).
        score: against what must be said; ``None`` for a control.
        alarm: a control of which anything was said.
        reason: why it ended early, or was not comparable.
        seconds: of the trial, without a launch.
        stages: seconds by stage.
    """

    trial: Trial
    verdict: str
    findings: tuple[Mapping[str, Any], ...] = ()
    score: Score | None = None
    alarm: bool = False
    reason: str = ""
    seconds: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            **self.trial.to_dict(),
            "verdict": self.verdict,
            "findings": [dict(one) for one in self.findings],
            "score": None if self.score is None else self.score.to_dict(),
            "alarm": self.alarm,
            "reason": self.reason,
            "seconds": round(self.seconds, 2),
            "stages": {name: round(value, 2) for name, value in self.stages.items()},
        }


class _Silent:
    def update(self, role: str, stage: str, detail: str) -> None:
        """Nobody looks."""


class Executor:
    """Trials in engines that are shared.

    Args:
        infos: a model by its name in a setting.
        directory: of the drill; patches and engines' files go below it.
        interpreters: where a case's engines run, with what its sides alone are asked for.
        extras: what options (``SIDE.NAME=VALUE``) and patches (``SIDE=FILE``) ask of each side.
        say: hears what is being done.
    """

    def __init__(
        self,
        faults: Mapping[str, Fault],
        infos: Callable[[str], ModelInfo],
        engines: tuple[Engine, Engine],
        directory: Path,
        interpreters: Callable[[Case, Mapping[str, SideExtras]], Mapping[str, Interpreter]],
        extras: Callable[[Iterable[str], Iterable[str]], Mapping[str, SideExtras]],
        say: Callable[[str], None],
        limits: Limits | None = None,
    ) -> None:
        self._faults, self._infos, self._engines = faults, infos, engines
        self._directory, self._say = directory, say
        self._interpreters, self._read = interpreters, extras
        self._limits = limits or Limits(step=60.0)
        self._pairs = 0

    def run(self, launch: Setting, work: Sequence[Work], done: Callable[[Told], None]) -> None:
        """All trials of one launch, in order; ``done`` hears of each.

        Raises:
            UserError: the engines do not start even without a fault.
        """
        left = list(work)
        for setting, trial in left if not launch.live else ():
            done(self._apart(setting, trial))
        while left and launch.live:
            part = left[:_TRIALS_OF_A_PAIR]
            ran = self._of_a_pair(launch, part, done)
            left = left[ran:]

    def run_sweeps(self, setting: Setting, next_one: Callable[[], Trial | None], done: Callable[[Told], None]) -> None:
        """Trials that follow from what came of those before; ``next_one`` says which, until there is none.

        Raises:
            UserError: the engines do not start even without a fault.
        """
        while (trial := next_one()) is not None:
            if not setting.live:
                done(self._apart(setting, trial))
                continue
            with self._pair(setting) as pair:
                for _ in range(_TRIALS_OF_A_PAIR):
                    done(self._trial(pair, setting, trial))
                    following = None if pair.broken else next_one()
                    if following is None:
                        break
                    trial = following

    @contextmanager
    def _pair(self, launch: Setting) -> Iterator[LivePair]:
        """Both engines, launched."""
        info = self._infos(launch.model)
        case = case_of(launch, info, self._engines)
        extras = self._extras(launch)
        self._pairs += 1
        place = self._directory / "engines" / f"{self._pairs:03d}"
        self._say(f"launching both engines: {launch.name}")
        with LivePair(case, info, self._interpreters(case, extras), place, extras, self._limits) as pair:
            yield pair

    def _of_a_pair(self, launch: Setting, work: Sequence[Work], done: Callable[[Told], None]) -> int:
        """Trials in one launch, until one breaks it; how many there were."""
        ran = 0
        with self._pair(launch) as pair:
            for setting, trial in work:
                done(self._trial(pair, setting, trial))
                ran += 1
                if pair.broken:
                    break
        return ran

    def _apart(self, setting: Setting, trial: Trial) -> Told:
        """A trial in engines of its own, launched with the fault."""
        info = self._infos(setting.model)
        case = case_of(setting, info, self._engines)
        extras = self._extras(setting, trial.side, self._patch(trial))
        interpreters = self._interpreters(case, extras)
        self._pairs += 1
        place = self._directory / "engines" / f"{self._pairs:03d}"
        session = Session(case, info, interpreters, place, self._limits, _Silent(), extras)
        return self._flow(session, case, setting, trial)[0]

    def _patch(self, trial: Trial) -> Path | None:
        """The trial's file; none for a control, but for what its sides may do differently."""
        if trial.benign:
            return patch_of(trial.benign)
        if not trial.fault:
            return None
        file = self._directory / "patches" / f"{trial.id}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(patch_text(self._faults[trial.fault], trial), encoding="utf-8")
        return file

    def _extras(self, setting: Setting, patched: str = "", file: Path | None = None) -> dict[str, SideExtras]:
        options = dict(setting.options)
        sets = tuple(
            f"{role}.{text}"
            for role, engine in zip(("candidate", "reference"), self._engines, strict=True)
            for text in options.get(engine, ())
        )
        return dict(self._read(sets, () if file is None else (f"{patched}={file}",)))

    def _trial(self, pair: LivePair, setting: Setting, trial: Trial) -> Told:
        """A trial in engines that are up."""
        case = case_of(setting, self._infos(setting.model), self._engines)
        extras = self._extras(setting, trial.side, self._patch(trial))
        found, whole = self._flow(pair.trial(case, extras, _Silent()), case, setting, trial)
        pair.broken = pair.broken or not whole
        return found

    def _flow(self, session: Session, case: Case, setting: Setting, trial: Trial) -> tuple[Told, bool]:
        """One run; and whether it ended without a defect of ours."""
        began, reason, whole = time.monotonic(), "", True
        flow = Flow(session, case, self._infos(setting.model), Wishes(allow=setting.allow))
        try:
            flow.run()
        except UserError as error:
            reason = error.message
        except Exception as error:  # a result of the drill, which must not end it
            reason, whole = f"a defect of align: {type(error).__name__}: {error}", False
        requests = [one.name for one in case.requests]
        return told(trial, flow.report, requests, reason, time.monotonic() - began), whole


def told(trial: Trial, report: Report, requests: Sequence[str], reason: str, seconds: float) -> Told:
    """What a report says of a trial."""
    findings = list(report.findings) or refused(report)
    return Told(
        trial=trial,
        verdict=report.verdict,
        findings=tuple(_kept(findings[:_KEPT])),
        score=None if trial.expected is None else score(trial.expected, findings, requests),
        alarm=trial.expected is None and (report.verdict != "aligned" or bool(findings)),
        reason=reason or report.reason,
        seconds=seconds,
        stages=dict(report.seconds),
    )


def refused(report: Report) -> list[Finding]:
    """What a run says that was refused because an engine was given other inputs, as the finding that it would be.

    A run is refused before anything is compared, and then it has no findings; the condition is its answer.
    """
    return [
        Finding("INPUT", one.name, side=one.sides[0] if len(one.sides) == 1 else None, evidence={"what": one.why})
        for one in report.conditions
        if one.name in _INPUTS and one.verdict == "false" and one.blocks
    ]


def _kept(findings: Iterable[Finding]) -> Iterable[dict[str, Any]]:
    for one in findings:
        yield {
            "path": one.path,
            "kind": one.evidence.get("fault", one.kind) if one.path == "A" else one.kind,
            "side": one.side,
            "checkpoint": one.checkpoint,
            "phase": one.phase,
            "step": one.step,
            "requests": list(one.requests),
            "ranks": list(one.ranks),
            "summary": one.summary,
        }
