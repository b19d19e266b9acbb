"""``align fa record``: the calls of a recording, as files that ``align fa check`` takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from align.attention.extract import Extracted, Wanted, extract
from align.cli.output import print_json
from align.errors import EXIT_ALIGNED, UserError
from align.fa.call import PHASES
from align.fa.files import FOLDER, Records, read_records
from align.fa.operators import resolve
from align.run.arguments import model_in
from align.run.directory import disk_error
from align.run.traces import find_trace, open_trace

_AGAIN = "record it: align capture ENGINE --case FILE --out DIR, or align run (without --no-fa)"


def execute(path: Path, wanted: Wanted, out: Path, as_json: bool) -> int:
    """Write the calls and say what they are.

    Raises:
        UserError: no recording, none of its calls are wanted, or a file that cannot be written.
    """
    wanted = _checked(wanted)
    directory = find_trace(path)
    trace = open_trace(directory)
    try:
        manifest = trace.manifest
    finally:
        trace.close()
    records = _records(directory)
    found = extract(records, model_in(manifest), wanted)
    if not found:
        raise UserError(f"{directory} has no such call; there are: {_there(records)}", "ask for one of these")
    try:
        out.write_text(json.dumps([one.to_dict() for one in found], indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise disk_error(error, out) from error
    console = Console(soft_wrap=True, highlight=False, emoji=False, markup=False, stderr=as_json)
    console.print(f"{len(found)} different calls, {sum(one.times for one in found)} in all, of {directory}: {out}")
    for line in _lines(found):
        console.print(line)
    console.print(f"next: align fa check {out}")
    if as_json:
        print_json(
            {
                "trace": str(directory),
                "out": str(out),
                "calls": len(found),
                "made": sum(one.times for one in found),
                "operators": sorted({one.call.operator for one in found}),
                "next": f"align fa check {out}",
            }
        )
    return EXIT_ALIGNED


def _checked(wanted: Wanted) -> Wanted:
    """With the operator's name as records have it."""
    if wanted.phase not in ("", *PHASES):
        raise UserError(f"no phase {wanted.phase!r}", f"use one of: {', '.join(PHASES)}")
    if not wanted.operator:
        return wanted
    try:
        return replace(wanted, operator=resolve(wanted.operator).name)
    except ValueError as error:
        raise UserError(str(error), "ask for one of these, or leave --operator out") from None


def _records(directory: Path) -> Records:
    try:
        records = read_records(directory / FOLDER)
    except ValueError as error:
        raise UserError(str(error), _AGAIN) from None
    if records is None or not records.seen:
        raise UserError(f"no call was recorded in {directory}", _AGAIN)
    return records


def _there(records: Records) -> str:
    """What was recorded, in short."""
    operators = sorted({records.calls[seen.call].operator for seen in records.seen})
    layers = sorted({layer for seen in records.seen for layer in seen.layers})
    steps = [seen.step.step for seen in records.seen]
    phases = sorted({seen.step.phase for seen in records.seen})
    return (
        f"{', '.join(operators)} in {' and '.join(phases)}, layers {layers[0]} to {layers[-1]}, "
        f"steps {min(steps)} to {max(steps)}, ranks {', '.join(map(str, records.ranks))}"
    )


def _lines(found: tuple[Extracted, ...]) -> list[str]:
    """One for each operator and phase."""
    groups: dict[tuple[str, str], list[Extracted]] = {}
    for one in found:
        groups.setdefault((one.call.operator, one.call.context.phase), []).append(one)
    return [
        f"{operator} in {phase}: {len(group)} different, {sum(one.times for one in group)} in all"
        for (operator, phase), group in groups.items()
    ]
