"""From a path that a user gave to a recording that can be read."""

from __future__ import annotations

from pathlib import Path

from align.errors import UserError
from align.run.complete import require_ranks
from align.trace.format import MANIFEST
from align.trace.pt import LooseFiles, import_pt
from align.trace.reader import Trace

#: The trace's directory inside a side's.
TRACE = "trace"


def find_trace(path: Path) -> Path:
    """The trace at a path: itself, or that of a run's side directory.

    Raises:
        UserError: there is none; says what is there instead.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist", "give a trace: the directory that align capture --out named")
    for directory in (path, path / TRACE):
        if (directory / MANIFEST).is_file():
            return directory
    sides = [name for name in ("candidate", "reference") if (path / name / TRACE / MANIFEST).is_file()]
    if sides:
        raise UserError(f"{path} is a whole run", f"name one of its sides: {path / sides[0]}")
    raise UserError(
        f"{path} is no trace and no directory of tensors: it holds neither {MANIFEST} nor .pt files",
        "give a directory that align capture made, RUN/candidate of an align run with tensors, or one of .pt files",
    )


def sides_of(candidate: Path, reference: Path | None) -> tuple[Path, Path]:
    """The two paths of a command that compares; the two sides of one run, if that alone is named.

    Raises:
        UserError: one path that is no run.
    """
    if reference is not None:
        return candidate, reference
    found = candidate / "candidate", candidate / "reference"
    if not all(path.is_dir() for path in found):
        what = "is no run, so that a second recording is needed" if candidate.exists() else "does not exist"
        raise UserError(f"{candidate} {what}", "name a run's directory, or the candidate's and the reference's")
    return found


def open_trace(directory: Path) -> Trace:
    """The trace, ready to be read.

    Raises:
        UserError: damaged, without one of its ranks, or written by another version.
    """
    try:
        trace = Trace(directory)
        require_ranks(trace)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(str(error), "record it again: align capture ENGINE --case FILE --out DIR") from error
    return trace


def open_recording(path: Path) -> Trace | LooseFiles:
    """Whatever can be compared: a trace, a run's side directory, or a directory of ``.pt`` files.

    Files that were exported say where they came from and are as good as the trace; others are names and tensors.

    Raises:
        UserError: none of these, or damaged.
    """
    if not has_pt_files(path):
        return open_trace(find_trace(path))
    try:
        found = import_pt(path)
        if isinstance(found, Trace):
            require_ranks(found)
        return found
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(str(error), "export it again: align export TRACE --format pt --out DIR") from error


def place_of(path: Path) -> Path:
    """Where the records at a path lie, whichever way they were named.

    Raises:
        UserError: there are none.
    """
    return (path if has_pt_files(path) else find_trace(path)).resolve()


def has_pt_files(path: Path) -> bool:
    """Whether a directory holds ``.pt`` files, itself or in directories of steps."""
    return path.is_dir() and any(next(path.glob(pattern), None) is not None for pattern in ("*.pt", "*/*.pt"))


def trace_bytes(directory: Path) -> int:
    """Bytes of all ranks' records in a trace, or of the files that were exported from one."""
    patterns = ("rank*/*", "*.pt", "step*/*.pt")
    return sum(path.stat().st_size for pattern in patterns for path in directory.glob(pattern) if path.is_file())
