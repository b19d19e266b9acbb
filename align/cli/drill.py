"""``align drill``: known faults in real engine runs, and what the harness says of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from adapters.base import SIDES
from align.cli.options import extras_of, interpreters_for
from align.cli.output import print_json
from align.cli.screen import Screen, screen
from align.cli.version import pinned
from align.drill.benign import benign_controls
from align.drill.campaign import (
    PLAN,
    REPORT,
    SUMMARY,
    Journal,
    Work,
    by_launch,
    check_same,
    control_settings,
    controls,
    setting_of,
    summary,
)
from align.drill.document import render
from align.drill.executor import Executor, Told
from align.drill.library import ENGINES, FOLDER, Fault, read_faults
from align.drill.settings import Setting
from align.drill.sweep import limits, next_of
from align.drill.trials import Trial, plan, quick, sweeps
from align.errors import EXIT_ALIGNED, EXIT_DIVERGED, UserError
from align.layout import Layout
from align.models.info import ModelInfo
from align.models.resolve import resolve_model
from align.run.directory import RunDirectory, disk_error
from align.run.plan import SIMULATED
from envs.home import align_home

#: Side → engine.
_SIDES: dict[str, str] = dict(zip(SIDES, ENGINES, strict=True))
#: Faults and controls of a quick drill.
QUICK, QUICK_CONTROLS = 10, 2
#: With so many controls, those in which the sides differ and may are among them: each takes a launch or two.
BENIGN_FROM = 50


@dataclass(frozen=True)
class DrillSettings:
    """The options of ``align drill``."""

    model: str
    device: str
    seed: int
    trials: int
    controls: int
    clean: Sequence[str]
    sweep: bool
    quick: bool
    only: Sequence[str]
    folders: Sequence[Path]
    out: Path | None
    list: bool
    new: str
    json: bool
    quiet: bool


def execute(settings: DrillSettings) -> int:
    """Run the drill, and return the exit code: 0 if everything was said as it must be, 1 if not.

    Raises:
        UserError: a fault that is none, nothing to run, or engines that do not start.
    """
    if settings.new:
        return _new(settings)
    faults = _faults(settings)
    if settings.list:
        return _list(faults, settings)
    console = screen(settings.quiet, settings.json)
    infos = lru_cache(maxsize=None)(partial(resolve_model, say=console.say))
    info = infos(settings.model)
    work = _planned(settings, faults, _SIDES, infos)
    out = (settings.out or align_home() / "drills" / f"{info.name}-{settings.seed}").absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, out) from error
    with closing(RunDirectory.reopen(out)):  # two drills at once would run the same trials
        return _run(settings, faults, infos, work, out, console)


def _run(
    settings: DrillSettings,
    faults: Sequence[Fault],
    infos: Callable[[str], ModelInfo],
    work: Sequence[Work],
    out: Path,
    console: Screen,
) -> int:
    info, engines = infos(settings.model), _SIDES
    check_same(
        out,
        {
            "model": info.name,
            "fingerprint": info.fingerprint,
            "device": settings.device,
            "seed": settings.seed,
            "trials": [trial.to_dict() for _, trial in work],
            "sweep": settings.sweep,
            "clean": {name: infos(name).fingerprint for name in settings.clean},
        },
    )
    journal = Journal(out)
    left = [(setting, trial) for setting, trial in work if trial.id not in journal.done]
    if len(left) < len(work):
        console.say(f"{len(work) - len(left)} of {len(work)} trials are done already: {out / PLAN}")
    executor = Executor(
        {fault.name: fault for fault in faults},
        infos,
        ENGINES,
        _fresh(out),
        lambda case, extras: interpreters_for(case, settings.device, extras),
        lambda sets, patches: extras_of(tuple(sets), tuple(patches)),
        console.say,
    )
    count = _Count(len(work), len(work) - len(left), console)
    for launch, part in by_launch(left).items():
        executor.run(launch, part, lambda told: _keep(journal, told, count))
    series = sweeps(faults, engines) if settings.sweep else ()
    _sweep(settings, series, engines, executor, journal, count)
    facts = {
        "model": info.name,
        "clean": [infos(name).name for name in settings.clean],
        "candidate": engines["candidate"],
        "reference": engines["reference"],
        "device": settings.device,
        "simulated": settings.device == SIMULATED,
        "seed": settings.seed,
        "versions": dict(pinned()[1]) if settings.device == SIMULATED else {},
        "quick": settings.quick,
        "limits": [one.to_dict() for one in limits(series, engines, settings.seed, journal.done)],
        "ended": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    found = summary([journal.done[trial.id] for _, trial in work], facts)
    (out / SUMMARY).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (out / REPORT).write_text(render(found), encoding="utf-8")
    if settings.json:
        print_json(found)
    _show(console, found, out)
    if settings.quiet and not settings.json:
        print(f"{_short(found)}: {out / REPORT}")
    return EXIT_ALIGNED if not found["misses"] and not found["alarms"] else EXIT_DIVERGED


def _sweep(
    settings: DrillSettings,
    series: Sequence[tuple[Fault, str]],
    engines: dict[str, str],
    executor: Executor,
    journal: Journal,
    count: _Count,
) -> None:
    """Halve the sizes of faults until nothing is said of them; those that share a launch, one after the other."""
    groups: dict[Setting, list[tuple[Fault, str]]] = {}
    for fault, side in series:
        groups.setdefault(setting_of(fault, settings.model), []).append((fault, side))

    def following(group: Sequence[tuple[Fault, str]]) -> Trial | None:
        ones = (next_of(fault, side, engines[side], settings.seed, journal.done) for fault, side in group)
        return next((one for one in ones if one is not None), None)

    for setting, group in groups.items():
        executor.run_sweeps(setting, partial(following, group), lambda told: _keep(journal, told, count))


def _faults(settings: DrillSettings) -> tuple[Fault, ...]:
    faults = read_faults((FOLDER, *settings.folders))
    if not settings.only:
        return faults
    chosen = tuple(
        one
        for one in faults
        if any(fnmatchcase(one.name, text) or text in (one.said.path, *one.said.kinds) for text in settings.only)
    )
    if not chosen:
        raise UserError(f"no fault is called {', '.join(settings.only)}", "align drill --list shows them")
    return chosen


def _planned(
    settings: DrillSettings, faults: Sequence[Fault], engines: dict[str, str], infos: Callable[[str], ModelInfo]
) -> list[Work]:
    of_name = {fault.name: fault for fault in faults}
    trials: Sequence[Trial] = plan(faults, engines, settings.seed, settings.trials)
    if settings.quick:
        # Those that share one launch: a second one takes longer than all their trials.
        plain = Setting(settings.model)
        shared = [one for one in trials if setting_of(of_name[one.fault], settings.model) == plain]
        trials = quick(shared, QUICK, settings.seed)
        work = [(plain, one) for one in trials]
        return work + controls([plain] * QUICK_CONTROLS)
    work = [(setting_of(of_name[one.fault], settings.model), one) for one in trials]
    models = (settings.model, *settings.clean)
    named = benign_controls(models) if settings.controls >= BENIGN_FROM else []
    work += named
    work += controls(
        control_settings(models, settings.seed, settings.controls - len(named), lambda name: _takes_two(infos(name)))
    )
    if not work:
        raise UserError("there is nothing to run", "give --trials or --controls of at least 1")
    return work


def _takes_two(info: ModelInfo) -> bool:
    """Whether two tensor-parallel ranks can share a model."""
    try:
        Layout(2, 1, 1).check_model(info.config)
    except ValueError:
        return False
    return True


def _fresh(out: Path) -> Path:
    """A directory for this call's engines: an earlier call's may still be looked at."""
    for number in range(1, 10_000):
        place = out / f"run{number:03d}"
        if not place.exists():
            place.mkdir()
            return place
    raise UserError(f"{out} was begun 9999 times", "choose another --out")


class _Count:
    """Says how far the drill is."""

    def __init__(self, total: int, done: int, console: Screen) -> None:
        self._total, self._done, self._console = total, done, console

    def told(self, told: Told) -> None:
        if told.trial.sweep:
            found = told.score is not None and told.score.found
            size = ", ".join(f"{name} {value}" for name, value in told.trial.drawn.items())
            self._console.say(f"{told.trial.id}: {'found' if found else 'silent'} at {size} ({told.seconds:.0f} s)")
            return
        self._done += 1
        if told.score is None:
            word = "FALSE ALARM" if told.alarm else "silent"
        else:
            word = "right" if told.score.right else f"WRONG: {told.score.why}"
        self._console.say(f"{self._done}/{self._total} {told.trial.id}: {word} ({told.seconds:.0f} s)")


def _keep(journal: Journal, told: Told, count: _Count) -> None:
    journal.add(told.to_dict())
    count.told(told)


def _short(found: dict[str, Any]) -> str:
    right = found["rates"]["right"]
    return f"{right['hits']} of {right['count']} faults right, {found['false_alarms']['hits']} false alarms"


def _show(console: Screen, found: dict[str, Any], out: Path) -> None:
    rates = found["rates"]
    console.say(_short(found))
    for name in ("found", "path", "checkpoint", "side"):
        one = rates[name]
        if one["share"] is not None:
            console.say(
                f"  {name}: {one['hits']} of {one['count']} ({100 * one['low']:.0f} to {100 * one['high']:.0f} %)"
            )
    for one in found["misses"]:
        console.say(f"  {one['id']}: {one['why']}")
    for one in found["alarms"]:
        console.say(f"  {one['id']}: false alarm: {one['said'] or one['reason']}")
    console.say(f"read: {out / REPORT}")


def _list(faults: Sequence[Fault], settings: DrillSettings) -> int:
    if settings.json:
        print_json({one.name: {"title": one.title, **one.said.model_dump(mode="json")} for one in faults})
        return EXIT_ALIGNED
    console = screen(settings.quiet)
    for one in faults:
        engines = "" if len(one.said.engines) == len(ENGINES) else f" ({', '.join(one.said.engines)} alone)"
        console.say(f"{one.name}: {one.title}{engines} Path {one.said.path}, {' or '.join(one.said.kinds)}.")
    console.say(f"{len(faults)} faults")
    return EXIT_ALIGNED


def _new(settings: DrillSettings, say: Callable[[str], None] = print) -> int:
    """Write a fault to begin with."""
    path = Path(settings.new if settings.new.endswith(".py") else f"{settings.new}.py")
    if path.exists():
        raise UserError(f"{path} is there already", "choose another name")
    text = resources.files("align.drill").joinpath("template.txt").read_text(encoding="utf-8")
    title = f"{path.stem.replace('_', ' ').capitalize()}: say here what is wrong."
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("@TITLE@", title), encoding="utf-8")
    except OSError as error:
        raise disk_error(error, path) from error
    say(f"{path} is a fault that runs as it is. Next:")
    say(f"  align run --patch candidate={path}            shows what it does")
    say(f"  align drill --faults {path.parent} --only {path.stem} --trials 2    scores what is said of it")
    return EXIT_ALIGNED
