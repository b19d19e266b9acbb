"""``align export``: a trace as files that other tools read."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from torch import Tensor

from adapters.probe.taps import load_taps
from adapters.probe.transforms import TRANSFORMS, Dims
from align.checkpoints.table import parse
from align.errors import EXIT_ALIGNED, UserError
from align.report.size import size_text
from align.run.directory import disk_error
from align.run.traces import find_trace, open_trace
from align.trace.pt import ToNative, export_pt
from align.trace.reader import Trace

_FORMATS = ("pt",)
_SHOWN_SKIPPED = 4


def execute(path: Path, out: Path, format_: str, native: bool) -> int:
    """Write the files, print what was written and what was not.

    Raises:
        UserError: no trace, an unknown format, or an output directory that cannot be used.
    """
    if format_ not in _FORMATS:
        raise UserError(f"--format {format_} is not known", f"choose one of {', '.join(_FORMATS)}")
    directory = find_trace(path)
    trace = open_trace(directory)
    console = Console(soft_wrap=True, highlight=False, emoji=False, markup=False)
    try:
        exported = export_pt(trace, out, native_forms(trace) if native else None)
    except ValueError as error:
        raise UserError(str(error), "choose another --out, or record the trace again: align capture") from error
    except OSError as error:
        raise disk_error(error, out) from error
    finally:
        trace.close()
    form = "shapes as the engine has them, fused projections in their parts" if native else "canonical shapes"
    console.print(f"{exported.files} files, {size_text(exported.bytes)}, {form}: {out}")
    for name, why in list(exported.skipped.items())[:_SHOWN_SKIPPED]:
        console.print(f"left out: {name}: {why}")
    if len(exported.skipped) > _SHOWN_SKIPPED:
        console.print(f"left out: {len(exported.skipped) - _SHOWN_SKIPPED} more")
    console.print(f"next: align compare {out} OTHER")
    return EXIT_ALIGNED


def native_forms(trace: Trace) -> ToNative:
    """The inverse of each tap's transform, for one engine.

    A fused tensor needs all of its parts; each is written as the slice that it is, in the fused tensor's shape.

    Raises:
        UserError: an engine without taps.
    """
    engine = str(trace.manifest["engine"])
    try:
        inverses = {tap.checkpoint: TRANSFORMS[tap.transform].inverse for tap in load_taps(engine)}
        dims = Dims.of(trace.structure, 0)
    except ValueError as error:
        raise UserError(f"the shapes of {engine} are not known: {error}", "export it without --native") from error

    def to_native(name: str, tensor: Tensor) -> Tensor | None:
        inverse = inverses.get(parse(name).kind.name)
        return None if inverse is None else inverse([tensor], dims)

    return to_native
