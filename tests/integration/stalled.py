"""The command, stopped in the middle of one stage: ``python stalled.py STAGE DIR ARGUMENT…``.

One function of the stage is replaced by one that first writes ``DIR/marker`` and then waits for ``DIR/release``. It
holds once: a later command that finds the marker passes. Production code has no hooks for this.

The stage ``environment`` runs ``envs.bootstrap`` with the locks in ``DIR/locks``; all others run ``align``.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from align.trace.format import STEPS_FILE

_POLL_SECONDS = 0.02
#: The engine's stage in which a launch is interrupted: its interpreter is up, its model is being built.
_BUILDING = "build"
#: What pip's process does first; it has an interpreter of its own.
_HOLD_IN_PIP = """
import pathlib, time
folder = pathlib.Path({folder!r})
try:
    (folder / "marker").touch(exist_ok=False)
    while not (folder / "release").exists():
        time.sleep(0.02)
except FileExistsError:
    pass
"""


def hold(folder: Path) -> None:
    """Wait, if nobody did so before."""
    try:
        (folder / "marker").touch(exist_ok=False)
    except FileExistsError:
        return
    while not (folder / "release").exists():
        time.sleep(_POLL_SECONDS)


def _before(module: Any, name: str, folder: Path) -> None:
    """Hold whenever the function is called."""
    original: Callable[..., Any] = getattr(module, name)

    def held(*args: Any, **kwargs: Any) -> Any:
        hold(folder)
        return original(*args, **kwargs)

    setattr(module, name, held)


def _stall_environment(folder: Path) -> None:
    """While pip runs; the virtual environment is there, its packages are not."""
    from envs import bootstrap, build

    ended, _, pip = build._PIP.partition("; ")  # the import; what ends pip with its builder comes before the wait
    dying, _, rest = pip.partition("; ")
    build._PIP = f"{ended}; {dying}\n{_HOLD_IN_PIP.format(folder=str(folder))}\n{rest}"
    setattr(bootstrap, "Builder", lambda: build.Builder(locks=folder / "locks"))  # noqa: B010 - a class for mypy


def _stall_model(folder: Path) -> None:
    """When everything but the weights is written."""
    from align.models import qwen3

    _before(qwen3, "weights", folder)


def _stall_side(folder: Path, reached: Callable[[Any], bool]) -> None:
    """In the thread that watches the candidate, as soon as its directory says so; the engines go on meanwhile."""
    from align.run.side import Side

    original = Side._report

    def report(self: Side, detail: Callable[[], str] | None) -> None:
        original(self, detail)
        if self.role == "candidate" and reached(self):
            hold(folder)

    Side._report = report  # type: ignore[method-assign]


def _is_building(side: Any) -> bool:
    try:
        return bool(json.loads((side.directory / "progress.json").read_text(encoding="utf-8"))["stage"] == _BUILDING)
    except FileNotFoundError:
        return False


def _is_recording(side: Any) -> bool:
    return any(log.stat().st_size > 0 for log in side.directory.glob(f"trace/rank*/{STEPS_FILE}"))


def _stall_compare(folder: Path) -> None:
    """Between the tokens and the tensors; both traces are whole."""
    from align.run import flow, offline

    _before(flow, "judge_tensors", folder)
    _before(offline, "judge_tensors", folder)


def _stall_report(folder: Path) -> None:
    """There is a verdict, and nothing of it is written yet but the details."""
    from align.cli import leave

    _before(leave, "forms", folder)


STALL: dict[str, Callable[[Path], None]] = {
    "environment": _stall_environment,
    "model": _stall_model,
    "launch": lambda folder: _stall_side(folder, _is_building),
    "capture": lambda folder: _stall_side(folder, _is_recording),
    "compare": _stall_compare,
    "report": _stall_report,
}


def main() -> None:
    """Entry point of the process."""
    stage, folder, arguments = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    # A shell without job control starts what it puts in the background with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    STALL[stage](folder)
    if stage == "environment":
        from envs import bootstrap

        sys.exit(bootstrap.main(arguments))
    from align.cli import main as align

    sys.argv = ["align", *arguments]
    align()


if __name__ == "__main__":
    main()
