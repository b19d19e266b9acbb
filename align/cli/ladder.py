"""The ladder of a run: its options, its rungs as ordinary runs below the run's directory, and what the terminal shows.

Rungs are run by whoever calls :func:`climb`, which passes the function that makes a run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from adapters.base import SIDES
from align.case.schema import Case, CaseLayout
from align.cli.errors import reason_of
from align.cli.leave import Known
from align.cli.part import Execute, ended_part, start_part
from align.cli.screen import Screen
from align.cli.settings import RunSettings
from align.errors import UserError
from align.ladder.executor import walk
from align.ladder.memory import USABLE, smallest_fit
from align.ladder.planner import ladder_to, ordered, starts_by_itself
from align.ladder.types import Headline, Ladder, Ran, SelfRan, Step
from align.layout import Layout, parse_layout
from align.models.info import ModelInfo
from align.report import ladder as shown
from align.report.read import read_result
from align.report.size import size_text
from align.result.climbed import with_ladder
from align.result.facts import Answers
from align.result.schema import Result
from align.run.directory import RESULT
from align.sentences import Said, said
from envs.memory import device_memory

#: Below a run's directory: its rungs.
LADDER = "ladder"
MODES = ("auto", "always", "never")
#: ``--against``: the simplest layout that fits.
SELF = "self"
_GB = 10**9


# --------------------------------------------------------------------------------------------------------- options


def layouts_of(texts: Sequence[str]) -> tuple[Layout, ...]:
    """``--layouts``: texts with layouts between commas, from the simplest up.

    Raises:
        UserError: one is no layout.
    """
    words = [word for text in texts for word in text.split(",") if word.strip()]
    try:
        return ordered(parse_layout(word) for word in words)
    except ValueError as error:
        raise UserError(f"--layouts: {error}", 'give for example --layouts "tp1, tp2, tp2 dp2"') from None


def with_target(settings: RunSettings) -> RunSettings:
    """A list of layouts names its target: the last of them.

    Raises:
        UserError: another target is given as well.
    """
    found = layouts_of(settings.layouts)
    if not found or settings.case is not None or settings.case_file is not None:
        return settings
    given = [size for size in settings.layout if size is not None]
    if given and Layout(*(size or 1 for size in settings.layout)) != found[-1]:
        raise UserError("--layouts decides what --tp, --dp and --ep would", "leave them out")
    return replace(settings, layout=(found[-1].tp, found[-1].dp, found[-1].ep))


def check(settings: RunSettings, case: Case, info: ModelInfo) -> None:
    """Refuse a ladder that cannot be, before anything is started.

    Raises:
        UserError: says which option is wrong.
    """
    if settings.ladder not in MODES:
        raise UserError(f"--ladder {settings.ladder} is not known", f"choose one of {', '.join(MODES)}")
    if settings.ladder == "always" and case.reference_layout is not None:
        raise UserError("--against has one layout against another, and no ladder", "leave --ladder or --against out")
    if settings.device_memory is not None and not settings.device_memory > 0:
        raise UserError(f"--device-memory {settings.device_memory:g} is no size", "give GB, as in --device-memory 64")
    if settings.min_tp is not None:
        _fits(Layout(settings.min_tp) if settings.min_tp > 0 else None, info, f"--min-tp {settings.min_tp}")
    for layout in layouts_of(settings.layouts):
        _fits(layout, info, f"--layouts: {layout}")
    found = ordered((*layouts_of(settings.layouts), case.layout.to_layout()))
    if settings.layouts and found[-1] != case.layout.to_layout():
        raise UserError(f"--layouts goes beyond the case's own layout, {case.layout.to_layout()}", "leave --case out")


def _fits(layout: Layout | None, info: ModelInfo, option: str) -> None:
    if layout is None:
        raise UserError(f"{option} is not possible: it is at least 1", "give for example --min-tp 2")
    try:
        layout.check_model(info.config)
    except ValueError as error:
        message, _, valid = str(error).partition("; ")
        raise UserError(f"{option} does not fit {info.name}: {message}", f"use {valid}") from None


def planned_of(settings: RunSettings, case: Case, info: ModelInfo) -> tuple[tuple[Layout, ...], tuple[Said, ...]]:
    """The rungs up to the case's layout, and what they rest on.

    Raises:
        UserError: the checkpoint's files cannot be read.
    """
    target = case.layout.to_layout()
    if settings.layouts:
        return ordered((*layouts_of(settings.layouts), target)), ()
    first, notes = _first_tp(settings, case, info)
    return ladder_to(target, first), notes


def _first_tp(settings: RunSettings, case: Case, info: ModelInfo) -> tuple[int, tuple[Said, ...]]:
    if settings.min_tp is not None:
        return settings.min_tp, (said("ladder.min_tp_given", tp=settings.min_tp),)
    given = settings.device_memory
    try:
        memory = device_memory(settings.device) if given is None else round(given * _GB)
    except ValueError as error:
        raise UserError(str(error), "unset the variable") from None
    if memory is None:
        return 1, (said("ladder.memory_unknown"),)
    fit = smallest_fit(case, info, memory)
    largest = max(fit.needs, default=case.layout.tp)
    tp = largest if fit.min_tp is None else fit.min_tp
    sizes = {"tp": tp, "need": size_text(fit.needs.get(tp, 0)), "memory": size_text(memory)}
    if fit.min_tp is None:
        return tp, (said("ladder.fits_none", **sizes),)
    return tp, (said("ladder.fits", usable=USABLE, **sizes),)


# ------------------------------------------------------------------------------------------------------ when to walk


def wanted(settings: RunSettings, case: Case, result: Result, failed: bool = False) -> bool:
    """Whether a run that ended goes on with a ladder."""
    if settings.ladder == "never" or case.reference_layout is not None:
        return False
    if settings.ladder == "always":
        return True
    first = result.findings[0].path if result.findings else None
    return not failed and starts_by_itself(case.layout.to_layout().world, result.verdict, first)


def goes_on_without_target(settings: RunSettings, known: Known, passes: Callable[[RunSettings, Case], bool]) -> bool:
    """Whether a target that was refused before its start leaves a ladder to walk.

    Args:
        passes: whether a case would be run at all.
    """
    case, info = known.case, known.info
    if settings.ladder != "always" or case is None or info is None or case.reference_layout is not None:
        return False
    try:
        check(settings, case, info)
        simpler = planned_of(settings, case, info)[0][:-1]
    except UserError:
        return False
    return any(passes(settings, case.with_layout(one)) for one in simpler)


def pending(settings: RunSettings, case: Case, result: Result) -> bool:
    """Whether a run has its verdict, and its ladder was broken off."""
    walked = result.ladder is not None and result.ladder.conclusion is not None
    return not walked and wanted(settings, case, result)


# ----------------------------------------------------------------------------------------------------------- the walk


def climb(settings: RunSettings, known: Known, console: Screen, execute: Execute) -> Result:
    """Walk the ladder of a run that ended, and publish its result anew after each rung.

    Args:
        known: of the target's run; its directory is in use.
        execute: makes a run.

    Returns:
        the result with the ladder.

    Raises:
        UserError: the result cannot be written.
    """
    assert known.case is not None and known.info is not None and known.result is not None
    assert known.directory is not None
    planned, notes = planned_of(settings, known.case, known.info)
    base = known.result
    target = replace(_ran_of(base, known.case.layout.to_layout()), seconds=sum(base.timing.seconds.values()))

    def told(state: Ladder) -> None:
        known.publish(with_ladder(base, state))

    if not settings.quiet:
        shown.show_plan(console, planned, notes)
    rungs = _Rungs(settings, known.case, known.directory.path, console, execute)
    done = walk(target.layout, planned, {target.layout: target}, rungs, told, notes)
    if not settings.quiet:
        shown.show_ladder(console, done)
    elif not settings.json:
        for line in shown.short(done):
            print(line)
    assert known.result is not None
    return known.result


@dataclass(frozen=True)
class _Rungs:
    """Rungs as ordinary runs in ``ladder/`` of the whole run's directory."""

    settings: RunSettings
    case: Case
    directory: Path
    console: Screen
    execute: Execute

    def run(self, step: Step) -> Ran:
        case = self.case.with_layout(step.layout)
        place = self.directory / LADDER / step.layout.name
        return self._ran(self.settings, case, place, str(step.layout))

    def run_self(self, side: str, layout: Layout, against: Layout) -> SelfRan:
        case = own_case(self.case.with_layout(layout), side, against)
        place = self.directory / LADDER / f"{side}_{layout.name}_against_{against.name}"
        settings = replace(own_options(self.settings, side), confirm=False)
        label = f"{case.candidate} at {layout} against itself at {against}"
        return SelfRan(side, case.candidate, self._ran(settings, case, place, label), against)

    def _ran(self, settings: RunSettings, case: Case, place: Path, label: str) -> Ran:
        relative = str(place.relative_to(self.directory))
        ended = ended_part(case, place)
        if ended is not None:
            shown.say(self.console, self.settings.quiet, f"{label}: {ended.verdict}, from an earlier walk")
            return replace(_ran_of(ended, case.layout.to_layout()), directory=relative)
        shown.say(self.console, self.settings.quiet, f"{label} …")
        started, why = time.monotonic(), ""
        try:
            start_part(settings, case, place, self.execute)
        except Exception as error:  # whatever it is, the other rungs can still tell something
            why = reason_of(error)[0]
        taken = time.monotonic() - started
        try:
            found = _ran_of(read_result(place / RESULT), case.layout.to_layout())
        except UserError:  # refused before there was anything to leave
            found = Ran(case.layout.to_layout(), "not comparable")
        if why:
            found = replace(found, verdict="not comparable", why=why)
        found = replace(found, directory=relative if place.is_dir() else "", seconds=taken)
        shown.say(self.console, self.settings.quiet, f"{label}: {shown.came_to(found)} ({taken:.0f} s)")
        return found


def _ran_of(result: Result, layout: Layout) -> Ran:
    first = result.findings[0] if result.findings else None
    headline = None if first is None else Headline(first.path, first.kind, first.side, first.checkpoint, first.summary)
    why = result.reason if result.verdict == "not comparable" else ""
    return Ran(layout, result.verdict, headline if result.verdict == "diverged" else None, why)


# ------------------------------------------------------------------------------------------- an engine against itself


def against(settings: RunSettings, info: ModelInfo, case: Case, answers: Answers) -> RunSettings:
    """``--against [SIDE:]LAYOUT`` or ``self``: the options of the same run with one engine on both sides.

    Raises:
        UserError: it is no layout of the model, or the very one that is run.
    """
    side, colon, text = settings.against.partition(":")
    side, text = (side, text) if colon else (SIDES[0], settings.against)
    if side not in SIDES:
        raise UserError(f"--against {settings.against}: {side} is no side", f"choose one of {', '.join(SIDES)}")
    try:
        simpler = Layout(_first_tp(settings, case, info)[0]) if text == SELF else parse_layout(text)
    except ValueError as error:
        raise UserError(f"--against: {error}", "give self, or a layout: --against tp1") from None
    _fits(simpler, info, f"--against {settings.against}")
    if simpler == case.layout.to_layout():
        raise UserError(
            f"--against {settings.against} is the layout of the run itself", "ask for more ranks, as in --tp 2"
        )
    return replace(
        own_options(settings, side),
        case=own_case(case, side, simpler),
        case_file=None,
        only=(),
        against="",
        ladder="never",
        named=(answers.model, answers.layout),
        command=settings.command or tuple(sys.argv),
    )


def own_case(case: Case, side: str, against: Layout) -> Case:
    """One side's engine at the case's layout as candidate, and at a simpler one as reference."""
    engine, numerics = getattr(case, side), getattr(case.numerics, side)
    return case.model_copy(
        update={
            "candidate": engine,
            "reference": engine,
            "numerics": case.numerics.model_copy(update=dict.fromkeys(SIDES, numerics)),
            "reference_layout": CaseLayout(tp=against.tp, dp=against.dp, ep=against.ep),
        }
    )


def own_options(settings: RunSettings, side: str) -> RunSettings:
    """What one side alone was given, given to both."""

    def both(texts: Sequence[str], mark: str) -> tuple[str, ...]:
        own = [text.removeprefix(f"{side}{mark}") for text in texts if text.startswith(f"{side}{mark}")]
        return tuple(f"{role}{mark}{text}" for role in SIDES for text in own)

    return replace(settings, sets=both(settings.sets, "."), patches=both(settings.patches, "="), numerics=())
