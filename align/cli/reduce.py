"""``align reduce``: the smallest case that still shows a run's first finding, in a directory that reproduces it."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from align.case.schema import Case, load_case
from align.cli import resume, run
from align.cli.errors import note_next, reason_of
from align.cli.output import print_json
from align.cli.part import ended_part, start_part
from align.cli.resume import ResumeSettings
from align.cli.screen import Screen, screen
from align.cli.settings import RunSettings
from align.errors import EXIT_ALIGNED, EXIT_NOT_COMPARABLE, UserError
from align.findings import Finding
from align.models.info import ModelInfo
from align.models.resolve import resolve_model
from align.reduce.executor import reduce
from align.reduce.layers import cut_layers, weight_bytes
from align.reduce.planner import Limits, label
from align.reduce.types import Ended, Fault, Proposal, Reduction, State, Tried
from align.report.read import read_result
from align.result.schema import Result
from align.run.directory import CASE, RESULT, disk_error
from align.run.earlier import last_diverged
from align.run.request import RunRequest, load_request
from envs.home import align_home

REDUCTION, SCRIPT = "reduction.json", "reproduce.sh"
TRIES, MODELS, PATCHES, SHOWN = "tries", "models", "patches", "run"
#: A checkpoint is copied to cut it; larger ones are run whole.
_MOST_BYTES = 20 * 10**9
#: What is kept of a try.
_KEPT = ("case.json", "request.json", "result.json", "report.md")


@dataclass(frozen=True)
class ReduceSettings:
    """The options of ``align reduce``."""

    run: Path | None
    out: Path | None
    tries: int
    json: bool
    quiet: bool


def execute(settings: ReduceSettings) -> int:
    """Reduce, and return the exit code: 0 if the smallest case shows the finding.

    Raises:
        UserError: the run has no finding, or is not what it was.
    """
    if settings.tries < 1:
        raise UserError(f"--tries {settings.tries} leaves nothing to try", "give at least 1")
    path = (settings.run or last_diverged()).absolute()
    request = load_request(path)
    request.check_patches()
    result = read_result(path / RESULT)
    finding = headline(result)
    if finding is None:
        raise UserError(
            f"{path} has no finding that could be kept: it is {result.verdict}", "name a run that diverged: align runs"
        )
    case = load_case(path / CASE)
    info = resolve_model(case.model)
    if info.fingerprint != request.fingerprint:
        raise UserError(f"the model {info.name} is not what it was when the run began", "start a new run: align run")
    console = screen(settings.quiet, settings.json)
    place = settings.out or align_home() / "reductions" / path.name
    place = place.absolute()
    _refuse_others(place, path)
    work = _Work(_options(request, path), place, info, console, settings.quiet)
    try:
        return _reduce(settings, work, path, State(case), finding)
    except (KeyboardInterrupt, SystemExit) as error:
        note_next(error, f"align reduce {path} --out {place}")
        raise
    except OSError as error:
        raise disk_error(error, place) from error


def _reduce(settings: ReduceSettings, work: _Work, path: Path, start: State, finding: Finding) -> int:
    fault = Fault.of(finding)
    work.place.mkdir(parents=True, exist_ok=True)
    work.say(f"finding to keep: {fault}")
    work.say(f"in {path}: {start.size}")
    limits = Limits(work.info.layers, weight_bytes(work.info.path) <= _MOST_BYTES)
    done = list[Tried]()

    def told(state: State, tried: Tried) -> None:
        done.append(tried)
        came = f"still there: {tried.size}" if tried.kept else f"gone: {tried.instead}"
        work.say(f"{len(done):3}. {tried.how} … {came} ({tried.seconds:.0f} s)")
        _write(work.place, path, Reduction(fault, start.size, state.size, tuple(done), False, False))

    smallest, reduction = reduce(start, finding, limits, work, told, settings.tries)
    shown = _reproduced(work, smallest, fault)
    reduction = replace(reduction, shown=shown)
    _write(work.place, path, reduction)
    if settings.json:
        print_json(_plain(path, work.place, reduction))
    for line in _summary(work, reduction):
        work.say(line)
    if settings.quiet and not settings.json:
        print(f"{reduction.after}; {'reproduced' if shown else 'NOT reproduced'}: {work.place / SCRIPT}")
    return EXIT_ALIGNED if shown else EXIT_NOT_COMPARABLE


def headline(result: Result) -> Finding | None:
    """What a run shows first; where tokens alone were compared, the first that differ. ``None`` if nothing is wrong."""
    if result.findings:
        return Finding.from_dict(result.findings[0].model_dump(mode="json"))
    runs = [] if result.tokens is None else [result.tokens.replay, result.tokens.free]
    for one in runs:
        real = [] if one is None else [place for place in one.differences if not place.near_tie]
        if real:
            first = min(real, key=lambda place: place.index)
            names = tuple(dict.fromkeys(place.request for place in real if place.index == first.index))
            return Finding("UNLOCATED", "tokens", None, step=first.index, requests=names)
    return None


def _refuse_others(place: Path, path: Path) -> None:
    """A directory that holds something else is left alone.

    Raises:
        UserError: says what it holds.
    """
    if not place.is_dir() or not any(place.iterdir()):
        return
    try:
        known = json.loads((place / REDUCTION).read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError, TypeError):
        known = ""
    if known != str(path):
        raise UserError(f"{place} holds something else", "name a new directory with --out")


def _options(request: RunRequest, path: Path) -> RunSettings:
    """Those of the run; nothing is asked of a try that does not bear on its first finding."""
    plain = resume.settings_of(request, path, ResumeSettings(None, False, True, False))
    return replace(plain, confirm=False, accuse=(), fresh=False, quiet=True)


@dataclass(frozen=True)
class _Work:
    """Tries as ordinary runs in ``tries/`` of the reduction's directory."""

    settings: RunSettings
    place: Path
    info: ModelInfo
    console: Screen
    quiet: bool

    def say(self, line: str) -> None:
        """Tell the user, on a terminal and in a log alike."""
        if not self.quiet:
            self.console.say(line)

    def run(self, proposal: Proposal) -> tuple[Ended, str]:
        """One smaller case; one that ended in an earlier reduction is not run again."""
        case = self.case_of(proposal.state)
        digest = hashlib.sha256(case.to_text().encode()).hexdigest()[:8]
        place = self.place / TRIES / f"{digest}-{label(proposal.how)}"
        return self.shown(self.settings, case, place), str(place.relative_to(self.place))

    def case_of(self, state: State) -> Case:
        """The case with its checkpoint, which is made if it has fewer layers."""
        if state.layers is None:
            return state.case
        cut = self.place / MODELS / f"{self.info.name}-{state.layers}-layers"
        if not (cut / "model.safetensors").is_file():
            cut_layers(self.info.path, state.layers, cut)
        return state.case.model_copy(update={"model": str(cut)})

    def shown(self, settings: RunSettings, case: Case, place: Path) -> Ended:
        """What a case shows first. Recordings are removed, because nobody looks at them again."""
        result = ended_part(case, place)
        if result is None:
            try:
                start_part(settings, case, place, run.execute)
            except Exception as error:  # whatever it is, the other cases can still tell something
                return Ended(None, "not comparable", reason_of(error)[0])
            result = read_result(place / RESULT)
            if place.parent.name == TRIES:
                _strip(place)
        return Ended(headline(result), result.verdict, result.reason)


def _strip(place: Path) -> None:
    for entry in place.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name not in _KEPT:
            entry.unlink()


def _reproduced(work: _Work, smallest: State, fault: Fault) -> bool:
    """Write what reproduces the smallest case, and run it."""
    patches = _copied(work.settings.patches, work.place / PATCHES)
    case = work.case_of(smallest)
    case.save(work.place / CASE)
    _script(work, patches)
    if (work.place / SHOWN).is_dir():
        shutil.rmtree(work.place / SHOWN)
    work.say("the smallest case once more, from the directory that reproduces it …")
    ended = work.shown(replace(work.settings, patches=patches), case, work.place / SHOWN)
    if ended.finding is None:
        work.say(f"it is {ended.verdict}{f': {ended.why}' if ended.why else ''}")
    return ended.finding is not None and Fault.of(ended.finding) == fault


def _copied(patches: Sequence[str], folder: Path) -> tuple[str, ...]:
    """The patches in a folder of their own, numbered, because two may have one name."""
    found = []
    for number, text in enumerate(patches):
        side, _, file = text.partition("=")
        folder.mkdir(exist_ok=True)
        copy = folder / f"{number}-{Path(file).name}"
        shutil.copyfile(file, copy)
        found.append(f"{side}={copy}")
    return tuple(found)


def _script(work: _Work, patches: Sequence[str]) -> None:
    settings = work.settings
    words = ["run", "--case", CASE, "--no-ladder"]
    words += ["--device", settings.device]
    for name, values in (("--set", settings.sets), ("--allow", settings.allow)):
        words += [word for value in values for word in (name, value)]
    for text in patches:
        side, _, file = text.partition("=")
        words += ["--patch", f"{side}={Path(file).relative_to(work.place)}"]
    lines = [
        "#!/bin/sh",
        "# Shows the finding of reduction.json again. ALIGN: path of the command (make -s path), if it is not on PATH.",
        'cd "$(dirname "$0")" || exit 2',
        f'exec "${{ALIGN:-align}}" {shlex.join(words)} "$@"',
    ]
    script = work.place / SCRIPT
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    script.chmod(0o755)


def _plain(path: Path, place: Path, reduction: Reduction) -> dict[str, object]:
    return {"run": str(path), "directory": str(place), **reduction.to_dict()}


def _write(place: Path, path: Path, reduction: Reduction) -> None:
    temporary = place / f".{REDUCTION}"
    temporary.write_text(json.dumps(_plain(path, place, reduction), indent=1) + "\n", encoding="utf-8")
    temporary.replace(place / REDUCTION)


def _summary(work: _Work, reduction: Reduction) -> list[str]:
    kept = sum(one.kept for one in reduction.tries)
    lines = [
        f"from: {reduction.before}",
        f"to:   {reduction.after} ({len(reduction.tries)} tries, {kept} of them kept)",
    ]
    if not reduction.complete:
        lines.append("there was more to try: give more --tries")
    if not reduction.shown:
        lines.append("the finding did NOT show again: it may not happen in every run")
    lines.append(f"reproduce it: {work.place / SCRIPT}")
    lines.append(f"read: {work.place / SHOWN / 'report.md'}")
    return lines
