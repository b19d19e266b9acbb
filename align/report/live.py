"""Progress of the sides while they work.

On a terminal a line per side that changes in place; elsewhere a line whenever a side enters another stage, and a sign
of life at intervals.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

_HEARTBEAT_SECONDS = 15.0


class LiveProgress:
    """A :class:`align.run.session.Watcher` that draws on a console.

    Args:
        engines: by role; the roles are the lines.
        quiet: draw nothing.
    """

    def __init__(self, console: Console, engines: dict[str, str], quiet: bool = False) -> None:
        self._console, self._engines, self._quiet = console, engines, quiet
        self._lock = threading.Lock()
        self._stages = dict.fromkeys(engines, ("wait", ""))
        self._since = dict.fromkeys(engines, time.monotonic())
        self._said = dict.fromkeys(engines, 0.0)
        self._started = time.monotonic()
        self._spinner = Spinner("dots")
        self._live = Live(console=console, get_renderable=self._render, transient=True, refresh_per_second=8)

    def __enter__(self) -> LiveProgress:
        if self._console.is_terminal and not self._quiet:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live.is_started:
            self._live.__exit__(kind, error, trace)

    def update(self, role: str, stage: str, detail: str) -> None:
        with self._lock:
            now = time.monotonic()
            changed = self._stages[role][0] != stage
            self._stages[role] = (stage, detail)
            if changed:
                self._since[role] = now
            if self._quiet or self._console.is_terminal:
                return
            if changed or now - self._said[role] > _HEARTBEAT_SECONDS:
                self._said[role] = now
                self._console.print(Text(f"[{now - self._started:6.1f}s] {self._line(role)}"))

    def _line(self, role: str) -> str:
        stage, detail = self._stages[role]
        return f"{role:<9} {self._engines[role]:<8} {stage}{': ' + detail if detail else ''}"

    def _render(self) -> Group:
        now = time.monotonic()
        with self._lock:
            lines = [
                Text(f"  {self._line(role)}  ({now - self._since[role]:.0f} s)", no_wrap=True, overflow="ellipsis")
                for role in self._engines
            ]
        self._spinner.update(text=f"{now - self._started:.0f} s")
        return Group(self._spinner, *lines)
