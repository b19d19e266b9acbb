"""``align calibrate``: clean runs, one after the other, and the floor that they make."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from adapters.base import SIDES
from align.calibrate.choose import NONE
from align.calibrate.floor import SUFFIX, FloorRun, Provenance, floor_of, floors_dir
from align.calibrate.pairs import Numbers, Say, measure_all
from align.calibrate.variants import Variant, variants
from align.case.build import new_case
from align.case.schema import Case, Decoding, explain
from align.cli import resume, run
from align.cli.options import budget_bytes, check_seconds, dtype_of
from align.cli.output import print_json
from align.cli.screen import screen
from align.compare.pairing import pair_rows
from align.compare.policy import TensorPolicy
from align.errors import EXIT_ALIGNED, UserError
from align.golden.flow import golden_trace
from align.golden.size import TooLargeError
from align.layout import Layout
from align.models.info import ModelInfo
from align.models.resolve import resolve_model
from align.report.floor import show_floor
from align.result.build import program_versions
from align.run.directory import CASE, REQUEST, RESULT
from align.run.flow import check_recordable
from align.run.manifest import REPLAY, generations_of
from align.run.plan import check_device, check_launchable
from align.run.resume import verdict_on_disk
from align.run.traces import find_trace, open_trace
from align.trace.reader import Trace


@dataclass(frozen=True)
class CalibrateSettings:
    """The options of ``align calibrate``."""

    model: str
    dtype: str
    tp: int
    runs: int
    device: str
    max_new_tokens: int | None
    golden: bool
    name: str | None
    out: Path | None
    work: Path | None
    values_budget: int | None
    launch_timeout: float
    step_timeout: float
    json: bool
    quiet: bool


def execute(settings: CalibrateSettings) -> int:
    """Run what is not there yet, measure, write the floor, and return the exit code.

    Raises:
        UserError: a run is not clean or failed, or the floor cannot be written.
    """
    console = screen(settings.quiet, settings.json)

    def say(line: str) -> None:
        console.say(line)

    check_seconds(launch_timeout=settings.launch_timeout, step_timeout=settings.step_timeout)
    budget_bytes(settings.values_budget)
    if settings.runs < 1:
        raise UserError(f"--runs {settings.runs} measures nothing", "give at least 1; 4 cover all kinds of differences")
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    info = resolve_model(settings.model, say)
    case = _case(settings, info)
    check_launchable(case)
    check_device(case, info, settings.device)
    check_recordable(info, case.layout.tp)
    name = settings.name or f"{info.name}-{case.dtype}-tp{case.layout.tp}-{settings.device}"
    file = settings.out or floors_dir() / f"{name}{SUFFIX}"
    planned = variants(case, info, settings.runs, settings.device)
    work = (settings.work or floors_dir() / f"{name}-{_key(case, settings.device)}.runs").absolute()
    for variant in planned:
        _run(settings, variant, planned, work, say)
    with ExitStack() as stack:
        recordings = {
            (variant.name, side): stack.enter_context(closing(open_trace(find_trace(work / variant.name / side))))
            for variant in planned
            for side in SIDES
        }
        golden = _golden(settings, planned, work, stack, say)
        policy = TensorPolicy.derived(case.dtype, info.layers)
        try:
            numbers = measure_all(planned, recordings, golden, policy, lambda label: say(f"measuring {label}"))
            about = _provenance(settings, info, case, planned, work, recordings, numbers, bool(golden), started)
            floor = floor_of(name, case.dtype, about, numbers.sides, numbers.golden, numbers.operators)
        except ValueError as error:
            raise UserError(
                f"no floor can be made of {work}: {error}", f"remove it and run again: rm -r {work}"
            ) from error
    floor.save(file)
    if settings.json:
        print_json(json.loads(floor.to_text()))
    show_floor(console, floor, file)
    if settings.quiet and not settings.json:
        print(file)
    return EXIT_ALIGNED


def _case(settings: CalibrateSettings, info: ModelInfo) -> Case:
    """The model's default prompts.

    Raises:
        UserError: options that make no case.
    """
    try:
        layout = Layout(settings.tp)
        tokens = settings.max_new_tokens
        decoding = None if tokens is None else Decoding(max_new_tokens=tokens)
    except ValidationError as error:
        raise explain(error, "the command line") from None
    except ValueError as error:
        raise UserError(str(error), "correct --tp") from None
    return new_case(info, layout=layout, decoding=decoding, dtype=dtype_of(settings.dtype)).case


def _key(case: Case, device: str) -> str:
    """Runs of another case or device are kept apart."""
    return hashlib.sha256(f"{device}\0{case.to_text()}".encode()).hexdigest()[:8]


# --------------------------------------------------------------------------------------------------------- the runs


def _run(settings: CalibrateSettings, variant: Variant, planned: Sequence[Variant], work: Path, say: Say) -> None:
    """One clean run in its own directory; what was begun there goes on, what has ended is used.

    Raises:
        UserError: it failed, is another case's, or is not clean.
    """
    place = work / variant.name
    about = f"{variant.name} of {len(planned)}: {variant.change}"
    if variant.numerics:
        about += f" ({', '.join(f'{side} {name}' for side, name in variant.numerics.items())})"
    ended = verdict_on_disk(place / RESULT)
    if (place / CASE).is_file() and (place / CASE).read_text(encoding="utf-8") != variant.case.to_text():
        raise UserError(
            f"{place} holds another case", f"name another directory: --work DIR, or remove it: rm -r {place}"
        )
    if ended is None:
        begun = (place / REQUEST).is_file()
        say(f"{about}{': going on' if begun else ''}")
        # Only the verdict: a run's own summary is in its directory.
        with contextlib.redirect_stdout(sys.stderr):
            if begun:
                resume.resume(resume.ResumeSettings(place, False, True, False))
            else:
                _start(settings, variant, planned, work)
        ended = verdict_on_disk(place / RESULT)
    else:
        say(f"{about}: there already")
    if ended is None or ended["verdict"] != "aligned":
        raise UserError(
            f"{variant.name} ({variant.change}) is not clean, so it makes no floor: {place / 'report.md'} says why",
            f"mend what it found, or compare it: align compare {place / SIDES[0]} {place / SIDES[1]}",
        )


def _start(settings: CalibrateSettings, variant: Variant, planned: Sequence[Variant], work: Path) -> None:
    place = work / variant.name
    if place.exists():  # broke off before there was anything to go on with
        shutil.rmtree(place)
    work.mkdir(parents=True, exist_ok=True)
    case_file = work / f"{variant.name}.case.json"
    variant.case.save(case_file)
    first = next(one for one in planned if one.group == variant.group)
    run.execute(
        run.RunSettings(
            model=None,
            prompts=None,
            case_file=case_file,
            device=settings.device,
            dtype=None,
            layout=(None, None, None),
            max_new_tokens=None,
            block_size=None,
            numerics=(),
            sets=variant.sets,
            patches=(),
            allow=variant.allow,
            policy="derived",
            floor=NONE,
            min_coverage=100.0,
            tensors=True,
            capture=(),
            values_budget=settings.values_budget,
            replay="auto",
            out=place,
            launch_timeout=settings.launch_timeout,
            step_timeout=settings.step_timeout,
            quiet=True,
            verbose=False,
            along=None if first is variant else _followed(work / first.name),
        )
    )


def _followed(place: Path) -> dict[str, tuple[int, ...]]:
    """Ids by request along which a run was recorded."""
    with closing(open_trace(find_trace(place / SIDES[1]))) as trace:
        return {one.request: one.token_ids for one in generations_of(trace.manifest, REPLAY) or ()}


def _golden(
    settings: CalibrateSettings, planned: Sequence[Variant], work: Path, stack: ExitStack, say: Say
) -> dict[int, Trace]:
    """Golden of the first run of each group; nothing, with the reason said, if it does not fit."""
    found: dict[int, Trace] = {}
    for variant in planned if settings.golden else ():
        if variant.group in found:
            continue
        try:
            found[variant.group] = stack.enter_context(closing(golden_trace(work / variant.name, say)))
        except TooLargeError as error:
            say(f"golden is left out: {error.message}")
            return {}
    return found


# --------------------------------------------------------------------------------------------------------- the file


def _provenance(
    settings: CalibrateSettings,
    info: ModelInfo,
    case: Case,
    planned: Sequence[Variant],
    work: Path,
    recordings: dict[tuple[str, str], Trace],
    numbers: Numbers,
    golden: bool,
    started: str,
) -> Provenance:
    one, other = (recordings[planned[0].name, side] for side in SIDES)
    return Provenance(
        created=started,
        command=tuple(sys.argv),
        align=program_versions()["align"],
        versions={str(trace.manifest["engine"]): dict(trace.manifest["versions"]) for trace in (one, other)},
        device=settings.device,
        simulated=any(bool(trace.manifest.get("simulated")) for trace in recordings.values()),
        model=info.name,
        fingerprint=info.fingerprint,
        architecture=str((info.config.get("architectures") or ["unknown"])[0]),
        layers=info.layers,
        layout=str(case.layout.to_layout()),
        runs=tuple(
            FloorRun(
                name=variant.name,
                change=variant.change,
                numerics=variant.numerics,
                verdict="aligned",
                directory=str(work / variant.name),
            )
            for variant in planned
        ),
        pairs=numbers.pairs,
        golden=golden,
        rows=len(pair_rows(one, other).rows),
    )
