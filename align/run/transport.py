"""How the driver talks to one engine host: through a Ray actor or through a process of its own.

A call returns at once; what is asked of the answer is whether it has come. So the watch over a side is the same for
every way to reach it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol


class HostDied(Exception):  # noqa: N818 - it is an event, and the side's error tells the user
    """The engine host will never answer; the text says how it ended."""


class Pending(Protocol):
    """The answer to one call.

    Both methods raise :class:`HostDied` when no answer can come any more.
    """

    def poll(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the answer; whether it is there."""

    def result(self) -> Any:
        """The answer; call it once :meth:`poll` said yes."""


class Host(Protocol):
    """One :class:`adapters.host.EngineHost`, wherever it runs."""

    def call(self, method: str, *args: Any) -> Pending:
        """Start ``method(*args)``; one call at a time."""


class Hosts(Protocol):
    """Starts engine hosts that end with the run. A context manager; leaving it ends every process of the run.

    Attributes:
        run_id: mark of the run's processes, see :mod:`align.run.guardian`.
        waits_for: what entering waits for, for people.
    """

    run_id: str
    waits_for: str

    def __enter__(self) -> Any: ...

    def close(self) -> None:
        """End everything that was started. Safe to call twice."""

    def start(self, python: Path, env: dict[str, str], engine: str, directory: Path) -> Host:
        """Start the host of ``engine`` under another interpreter.

        Args:
            env: complete but for what every process inherits; set before the interpreter starts.
            directory: of the side; exists.
        """
