"""Engine hosts as plain processes of this machine: no cluster, one private pipe for each."""

from __future__ import annotations

import contextlib
import os
import subprocess
import uuid
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any

from align.run import guardian
from align.run.guard import Guard
from align.run.transport import HostDied

_END_SECONDS = 2.0
_POLL_SECONDS = 0.05
#: Of the driver's own environment; they would decide what another interpreter finds.
_NOT_INHERITED = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP")


class LocalHosts:
    """Context manager; everything started inside carries :attr:`run_id` in its environment.

    One of the :class:`align.run.transport.Hosts`. It ends its processes as the cluster does: politely on the way out,
    and by the guardian when the driver is gone.
    """

    waits_for = "its process"

    def __init__(self) -> None:
        self.run_id = uuid.uuid4().hex
        self._guard: Guard | None = None
        self._started: list[LocalHost] = []

    def __enter__(self) -> LocalHosts:
        self._guard = Guard(self.run_id)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, python: Path, env: dict[str, str], engine: str, directory: Path) -> LocalHost:
        """The host of an engine as a process; its output goes to the side's ``engine.log`` from the first line on."""
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        # The directory that the process starts in is not searched for modules (-P, which Python 3.10 does not know).
        complete = {**inherited, "PYTHONSAFEPATH": "1", **env, guardian.MARK: self.run_id}
        ours, theirs = Pipe()
        command = [str(python), "-m", "adapters.host", "--engine", engine, "--dir", str(directory)]
        try:
            with (directory / "engine.log").open("ab") as log:
                process = subprocess.Popen(
                    [*command, "--channel", str(theirs.fileno())],
                    env=complete,
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    # Ctrl-C reaches the driver alone, which then ends this process in its own way.
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise HostDied(f"{python} cannot be started: {error.strerror or error}") from error
        finally:
            theirs.close()
        host = LocalHost(process, ours)
        self._started.append(host)
        return host

    def close(self) -> None:
        """End every process of the run. Safe to call twice."""
        started, self._started = self._started, []
        for host in started:
            host.end()
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()


class LocalHost:
    """A :class:`align.run.transport.Host` at the other end of a pipe."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Connection[Any, Any]) -> None:
        self._process, self._channel = process, channel

    def call(self, method: str, *args: Any) -> LocalCall:
        try:
            self._channel.send((method, args))
        except OSError as error:
            raise HostDied(self.how_it_ended()) from error
        return LocalCall(self, self._channel)

    def is_gone(self) -> bool:
        return self._process.poll() is not None

    def how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        code = self._process.returncode
        if code is None:
            return "it closed its end of the pipe"
        return f"its process was killed by signal {-code}" if code < 0 else f"its process ended with exit code {code}"

    def end(self) -> None:
        """Close the pipe, which tells the host to go; what stays is the guardian's."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)


class LocalCall:
    """A :class:`align.run.transport.Pending` on a pipe."""

    def __init__(self, host: LocalHost, channel: Connection[Any, Any]) -> None:
        self._host, self._channel = host, channel

    def poll(self, seconds: float) -> bool:
        try:
            # A worker that was forked may hold the pipe open after the host's death, so the process is looked at too.
            gone = self._host.is_gone()
            if self._channel.poll(_POLL_SECONDS if gone else seconds):
                return True
        except OSError as error:
            raise HostDied(self._host.how_it_ended()) from error
        if gone:
            raise HostDied(self._host.how_it_ended())
        return False

    def result(self) -> Any:
        try:
            done, answer = self._channel.recv()
        except (EOFError, OSError) as error:
            raise HostDied(self._host.how_it_ended()) from error
        if not done:
            raise HostDied(str(answer))
        return answer
