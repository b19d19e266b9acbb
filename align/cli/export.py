"""``align export``: a trace as files that other tools read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from align.cli.output import print_json
from align.errors import EXIT_ALIGNED, UserError
from align.report.size import size_text
from align.run.directory import disk_error
from align.run.traces import find_trace, open_trace
from align.trace.native import NativeForms
from align.trace.pt import INDEX
from align.trace.pt_export import export_pt
from align.trace.reader import DamagedFileError, Trace

_FORMATS = ("pt",)
_SHOWN = 4


def execute(path: Path, out: Path, format_: str, native: bool, json: bool = False) -> int:
    """Write the files, print what was written and what was not.

    Raises:
        UserError: no trace, an unknown format, or an output directory that cannot be used.
    """
    if format_ not in _FORMATS:
        raise UserError(f"--format {format_} is not known", f"choose one of {', '.join(_FORMATS)}")
    directory = find_trace(path)
    trace = open_trace(directory)
    console = Console(soft_wrap=True, highlight=False, emoji=False, markup=False, stderr=json)
    try:
        exported = export_pt(trace, out, _native_forms(trace) if native else None)
    except DamagedFileError as error:
        raise UserError(str(error), "record the trace again: align capture ENGINE --case FILE --out DIR") from error
    except ValueError as error:
        full = out.is_dir() and any(out.iterdir())
        hint = "choose another --out" if full else "record the trace again: align capture ENGINE --case FILE --out DIR"
        raise UserError(str(error), hint) from error
    except OSError as error:
        raise disk_error(error, out) from error
    finally:
        trace.close()
    form = f"shapes as {trace.manifest['engine']} has them" if native else "canonical shapes"
    console.print(f"{exported.files} files, {size_text(exported.bytes)}, {form}: {out}")
    _show(console, "canonical shapes", exported.canonical)
    _show(console, "left out", exported.skipped)
    next_step = f"align compare {out} OTHER"
    console.print(f"next: {next_step}")
    if json:
        found = {"trace": str(directory), "out": str(out), "shapes": "native" if native else "canonical"}
        print_json({**found, **asdict(exported), "next": next_step})
    return EXIT_ALIGNED


def _native_forms(trace: Trace) -> NativeForms:
    engine = str(trace.manifest.get("engine", "an unknown engine"))
    try:
        return NativeForms.of(engine)
    except ValueError as error:
        raise UserError(f"the shapes of {engine} are not known: {error}", "export it without --native") from error


def _show(console: Console, what: str, names: Mapping[str, str]) -> None:
    for name, why in list(names.items())[:_SHOWN]:
        console.print(f"{what}: {name}: {why}")
    if len(names) > _SHOWN:
        console.print(f"{what}: {len(names) - _SHOWN} more, in {INDEX}")
