"""Progress of the sides while they work.

On a terminal a line per side that changes in place, with steps and the time that is left where both are known;
elsewhere a line whenever a side enters another stage, and a sign of life at intervals.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from align.report.steps import Pace

_HEARTBEAT_SECONDS = 15.0
#: Stages whose steps are the engine's: as many each time.
_STEPPING = frozenset({"generate", "generate again", "replay", "record", "record again", "replay routing", "confirm"})


class LiveProgress:
    """A :class:`align.run.session.Watcher` that draws on a console.

    Args:
        engines: by role; the roles are the lines.
        quiet: draw nothing.
        steps: that an engine is expected to take for one generation. What it really took is expected the next time.
    """

    def __init__(
        self, console: Console, engines: dict[str, str], quiet: bool = False, steps: int | None = None
    ) -> None:
        self._console, self._engines, self._quiet = console, engines, quiet
        self._expected = dict.fromkeys(engines, steps)
        self._paces = {role: Pace() for role in engines}
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
            before = self._stages[role][0]
            changed = before != stage
            self._stages[role] = (stage, detail)
            if changed:
                self._since[role] = now
                took = self._paces[role].done
                if before in _STEPPING and took:
                    self._expected[role] = took
                self._paces[role] = Pace(self._expected[role] if stage in _STEPPING else None)
            self._paces[role].hear(detail, now)
            if self._quiet or self._console.is_terminal:
                return
            if changed or now - self._said[role] > _HEARTBEAT_SECONDS:
                self._said[role] = now
                self._console.print(Text(f"[{now - self._started:6.1f}s] {self._line(role)}"))

    def _line(self, role: str) -> str:
        stage, detail = self._stages[role]
        return f"{role:<9} {self._engines[role]:<8} {stage}{': ' + detail if detail else ''}"

    def _drawn(self, role: str, now: float) -> str:
        """The line of a terminal."""
        detail = self._stages[role][1]
        pace, said = self._paces[role], self._line(role)
        if pace.total is not None and detail == f"step {pace.done}":
            said += f"/{pace.total}"
        left = pace.seconds_left(now)
        return f"  {said}{'' if left is None else f', {_about(left)} left'}  ({now - self._since[role]:.0f} s)"

    def _render(self) -> Group:
        now = time.monotonic()
        with self._lock:
            lines = [Text(self._drawn(role, now), no_wrap=True, overflow="ellipsis") for role in self._engines]
        self._spinner.update(text=f"{now - self._started:.0f} s")
        return Group(self._spinner, *lines)


def _about(seconds: float) -> str:
    """As exact as an estimate is."""
    return f"about {max(round(seconds), 1)} s" if seconds < 90 else f"about {round(seconds / 60)} min"
