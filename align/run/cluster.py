"""The Ray cluster of one run: a given one is joined, otherwise a local one lives exactly as long as the run."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from adapters.host import EngineHost
from align.errors import UserError
from align.run import guardian
from align.run.guard import Guard
from align.run.transport import HostDied

#: Ray's name for the devices of Ascend, as lmdeploy and vLLM ask for them; enough for both sides and a fresh engine.
_DEVICES, _DEVICE_COUNT = "NPU", 64
#: Ray's smallest accepted object store; only plain data and small arrays travel through it.
_OBJECT_STORE_BYTES = 100 << 20
_CONNECT_SECONDS = 5.0
#: Ray's own processes that it cannot do without, by the names that the kernel knows.
_SERVICES = ("gcs_server", "raylet")
#: Ray ends the driver, with the exit code of a divergence, so many seconds after its gcs_server died (its default: 60).
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
_RECONNECT_SECONDS = 24 * 3600
#: What Ray says when it gave up waiting for its own processes (2.60.0).
_SLOW = "timed out during startup"
#: Where Ray keeps a user's token.
_RAY_TOKEN = Path.home() / ".ray" / "auth_token"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ADDRESS_HINT = "check the address with 'ray status --address …', or unset RAY_ADDRESS for a cluster of this run's own"


def _host_and_port(address: str) -> tuple[str, int | None]:
    """The parts of ``host:port``; no port for Ray's other forms (``auto``, ``ray://…``)."""
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() and "/" not in address else (address, None)


class Cluster:
    """Context manager around Ray. Everything started inside carries :attr:`run_id` in its environment.

    One of the :class:`align.run.transport.Hosts`: engine hosts are actors.

    Raises:
        UserError: on entry, when the cluster that ``RAY_ADDRESS`` names cannot be joined or Ray does not start.
    """

    waits_for = "Ray"

    def __init__(self) -> None:
        self.run_id = uuid.uuid4().hex
        self.address = os.environ.get("RAY_ADDRESS", "")
        self._guard: Guard | None = None
        self._services: dict[int, str] = {}

    # ---------------------------------------------------------------------------------------------- enter, exit

    def __enter__(self) -> Cluster:
        self._guard = Guard(self.run_id)
        try:
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def _connect(self) -> None:
        assert self._guard is not None
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ.setdefault(RECONNECT, str(_RECONNECT_SECONDS))
        host, port = _host_and_port(self.address)
        if not self.address or host in _LOOPBACK:
            # Ray replaces a loopback address by the machine's own, unless it is told that clusters are off; only then
            # do its servers listen on, and its clients connect to, the loopback interface.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if port is not None:
            self._probe(host, port)
        self._authenticate()
        import ray

        _silence(sys.modules.get("ray._private.worker"))
        # Ray puts its own handler in place of ours, and answers SIGTERM with a stack trace.
        ours = signal.getsignal(signal.SIGTERM)
        # Ray's own start inherits this environment, so its processes carry the mark; a joined cluster's do not.
        os.environ[guardian.MARK] = self.run_id
        try:
            common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
            if self.address:
                ray.init(address=self.address, **common)
            else:
                self._start_local(ray.init, common)
                self._services = {
                    pid: name for pid in guardian.marked(self.run_id) if (name := _name(pid)) in _SERVICES
                }
        except Exception as error:  # a start that takes too long is no better than that
            what = f"the Ray cluster at RAY_ADDRESS={self.address}" if self.address else "a local Ray cluster"
            hint = (
                _ADDRESS_HINT
                if self.address
                else "free some memory and disk space in the temporary directory (TMPDIR), or wait until the machine "
                "is less busy; then run the command again"
            )
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{what} could not be reached: {first_line}", hint) from error
        finally:
            os.environ.pop(guardian.MARK, None)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, ours)

    def _start_local(self, init: Callable[..., Any], common: dict[str, Any]) -> None:
        assert self._guard is not None
        # Ray makes its workers give way to everything else (15); an engine would stand still on a busy machine.
        os.environ.setdefault("RAY_worker_niceness", "0")
        for last in (False, True):
            try:
                init(
                    num_cpus=max(4, os.cpu_count() or 1),
                    include_dashboard=False,
                    # Engines whose workers are actors ask for devices; nobody else counts on the number.
                    resources={_DEVICES: _DEVICE_COUNT},
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=self._guard.temp_dir,
                    **common,
                )
                return
            except Exception as error:
                # Ray's own limit is 30 s, which a busy machine exceeds; a second start finds the files in memory.
                if last or _SLOW not in str(error):
                    raise
                guardian.sweep(self.run_id, but=frozenset({os.getpid()}))

    def _authenticate(self) -> None:
        """Choose Ray's token authentication, unless the user chose.

        A cluster of our own gets a token of its own: Ray would otherwise write one into the user's home. To a given
        cluster a token that is there is shown; Ray itself fails to when the address is explicit (seen with 2.60.0).
        """
        if "RAY_AUTH_MODE" in os.environ:
            return
        if not self.address:
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        elif not ("RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ or _RAY_TOKEN.is_file()):
            return
        os.environ["RAY_AUTH_MODE"] = "token"

    def _probe(self, host: str, port: int) -> None:
        """Ray itself tries an address where nothing listens for minutes."""
        try:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            raise UserError(
                f"the Ray cluster at RAY_ADDRESS={self.address} could not be reached: {error.strerror or error}",
                _ADDRESS_HINT,
            ) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End Ray and every process of the run. Safe to call twice."""
        if "ray" in sys.modules:
            import ray

            with contextlib.suppress(Exception):  # whatever Ray leaves behind, the guardian ends
                ray.shutdown()
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()

    # ---------------------------------------------------------------------------------------------------- actors

    def actor(self, cls: type, python: Path, env: dict[str, str], *args: Any) -> Any:
        """Start ``cls(*args)`` as an actor under another interpreter, on this machine.

        Ray forwards few environment variables by itself, hence ``env`` is given to the actor whole.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {
            # A host is not accounted for: all groups of both sides, and fresh engines beside them, must find room.
            "num_cpus": 0,
            "max_restarts": 0,
            "runtime_env": {"py_executable": str(python), "env_vars": {**env, guardian.MARK: self.run_id}},
            # The side's directory is read from here, so the actor must share this machine's files.
            "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
        }
        return ray.remote(cls).options(**options).remote(*args)

    def start(self, python: Path, env: dict[str, str], engine: str, directory: Path) -> ActorHost:
        """The host of an engine as an actor."""
        return ActorHost(self.actor(EngineHost, python, env, engine, str(directory)), self.require_services)

    def require_services(self) -> None:
        """Whoever waits for an actor may wait for ever once Ray itself is broken.

        Raises:
            UserError: one of the local cluster's own processes has ended.
        """
        for pid, name in self._services.items():
            if _name(pid) != name:
                raise UserError(
                    f"Ray's {name} has ended, and the run with it: it was killed, or memory ran out",
                    "run the command again; 'dmesg' tells whether memory ran out",
                )


def _name(pid: int) -> str:
    """What the kernel calls a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        _, _, rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").partition("(")
        name, _, fields = rest.rpartition(")")
        return "" if fields.split()[0] in "ZX" else name
    return ""


class ActorHost:
    """A :class:`align.run.transport.Host` in a Ray actor.

    Args:
        require: raises if there is no point in waiting.
    """

    def __init__(self, actor: Any, require: Callable[[], None] = lambda: None) -> None:
        self._actor, self._require = actor, require

    def call(self, method: str, *args: Any) -> ActorCall:
        return ActorCall(getattr(self._actor, method).remote(*args), self._require)


class ActorCall:
    """A :class:`align.run.transport.Pending` of Ray."""

    def __init__(self, reference: Any, require: Callable[[], None] = lambda: None) -> None:
        self._reference, self._require = reference, require

    def poll(self, seconds: float) -> bool:
        import ray

        try:
            if ray.wait([self._reference], timeout=seconds)[0]:
                return True
        except ray.exceptions.RayError as error:
            self._require()
            raise HostDied(_reason(error)) from error
        self._require()
        return False

    def result(self) -> Any:
        import ray

        try:
            return ray.get(self._reference)
        except ray.exceptions.RayError as error:
            self._require()
            raise HostDied(_reason(error)) from error


def _reason(error: Exception) -> str:
    if "ActorDied" in type(error).__name__ or "WorkerCrashed" in type(error).__name__:
        return "its process was killed or crashed"
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else 'no message'}"


def _silence(worker: Any) -> None:
    """Ray tells on standard output of processes that died, in colour and also without log_to_driver (2.60.0); there may
    be nothing there but JSON.
    """
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None
