"""The cluster's refusals and its temporary directory, without starting Ray."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from adapters.host import EngineHost
from align.errors import UserError
from align.run import guard, guardian
from align.run.cluster import RECONNECT, ActorCall, Cluster
from tests.unit.align.run import fakes, processes


class FakeRay(ModuleType):
    """Records how Ray is started, and does as Ray does to the handler of SIGTERM."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("ray")
        self.error = error
        self.given: dict[str, Any] = {}
        self.marks: list[str | None] = []
        self.shut_down = 0

    def init(self, **given: Any) -> None:
        self.given = given
        self.marks.append(os.environ.get(guardian.MARK))
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        if self.error is not None:
            raise self.error

    def shutdown(self) -> None:
        self.shut_down += 1


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeRay]:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", guardian.MARK):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(guard, "_adopt_orphans", lambda: None)
    monkeypatch.setattr(guard, "_reap", lambda: None)
    before, environ = signal.getsignal(signal.SIGTERM), dict(os.environ)
    yield fake
    os.environ.clear()
    os.environ.update(environ)
    assert signal.getsignal(signal.SIGTERM) is before, "Ray's handler stayed"


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary directories are made."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_local_cluster_lives_as_long_as_the_run(ray: FakeRay) -> None:
    cluster = Cluster()
    with cluster:
        temp = Path(ray.given["_temp_dir"])
        assert temp.is_dir()
        assert ray.given["_node_ip_address"] == "127.0.0.1"
        assert ray.given["include_dashboard"] is False
        assert ray.marks == [cluster.run_id], "what Ray starts carries the mark"
        assert guardian.MARK not in os.environ, "what the driver itself starts does not"
        assert cluster._guard is not None
        watcher = cluster._guard.process
        assert watcher.poll() is None
    assert ray.shut_down == 1
    assert watcher.poll() == 0
    assert not temp.exists()
    cluster.close()


def test_runs_differ() -> None:
    assert Cluster().run_id != Cluster().run_id


def test_a_given_cluster_is_joined(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with Cluster():
            assert ray.given["address"] == address
            assert "num_cpus" not in ray.given


def test_an_address_where_nothing_listens(ray: FakeRay, monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    cluster = Cluster()
    with pytest.raises(UserError, match=f"RAY_ADDRESS=127.0.0.1:{port} could not be reached") as caught, cluster:
        raise AssertionError("entered")
    assert "unset RAY_ADDRESS" in caught.value.hint
    assert cluster._guard is None
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [RuntimeError("cannot start\nmore"), ConnectionError(""), OSError(28, "No space left"), Exception("timed out")],
)
def test_a_cluster_that_does_not_start(ray: FakeRay, error: Exception, temporary: Path) -> None:
    ray.error = error
    cluster = Cluster()
    with pytest.raises(UserError, match="a local Ray cluster could not be reached") as caught, cluster:
        raise AssertionError("entered")
    assert "\n" not in caught.value.message
    assert "TMPDIR" in caught.value.hint
    assert cluster._guard is None
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(("failures", "starts"), [(1, 2), (2, 2)])
def test_a_slow_start_is_tried_once_more(
    ray: FakeRay, failures: int, starts: int, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    tried: list[str | None] = []

    def init(**given: Any) -> None:
        tried.append(os.environ.get(guardian.MARK))
        if len(tried) <= failures:
            raise Exception("The current node timed out during startup. This could happen because …")

    monkeypatch.setattr(ray, "init", init)
    cluster = Cluster()
    if failures < starts:
        with cluster:
            pass
    else:
        with pytest.raises(UserError, match="a local Ray cluster could not be reached") as caught, cluster:
            raise AssertionError("entered")
        assert "less busy" in caught.value.hint
    assert tried == [cluster.run_id] * starts
    assert list(temporary.iterdir()) == []


def test_no_room_for_a_temporary_directory(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(UserError, match="no temporary directory can be made: No space left") as caught, Cluster():
        raise AssertionError("entered")
    assert "TMPDIR" in caught.value.hint


def test_a_long_temporary_directory_is_replaced(ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unix sockets below it would have names that are too long."""
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with Cluster():
        assert len(ray.given["_temp_dir"]) <= 45
    assert list(long.iterdir()) == []


def test_actors_get_their_interpreter_and_the_mark(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}

    class Remote:
        def options(self, **given: Any) -> Any:
            options.update(given)
            return SimpleNamespace(remote=lambda *args: ("actor", args))

    context = SimpleNamespace(get_node_id=lambda: "this node")
    made: list[type] = []

    def remote(cls: type) -> Remote:
        made.append(cls)
        return Remote()

    vars(ray).update(remote=remote, get_runtime_context=lambda: context)
    strategies: Any = ModuleType("ray.util.scheduling_strategies")
    strategies.NodeAffinitySchedulingStrategy = lambda node, soft: (node, soft)
    for name, module in (("ray.util", ModuleType("ray.util")), (strategies.__name__, strategies)):
        monkeypatch.setitem(sys.modules, name, module)
    cluster = Cluster()
    assert cluster.actor(dict, Path("/env/bin/python"), {"NAME": "value"}, 1, 2) == ("actor", (1, 2))
    env = {"NAME": "value", guardian.MARK: cluster.run_id}
    assert options["runtime_env"] == {"py_executable": "/env/bin/python", "env_vars": env}
    assert options["scheduling_strategy"] == ("this node", False), "it shares this machine's files"
    assert options["max_restarts"] == 0
    host: Any = cluster.start(Path("/env/bin/python"), {}, "vllm", Path("/run/reference"))
    assert made == [dict, EngineHost]
    assert host._actor == ("actor", ("vllm", "/run/reference"))


def test_a_dead_service_of_ray_ends_the_waiting(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would wait for a minute, and then end the driver with the exit code of a divergence."""
    started = []

    def init(**_: Any) -> None:
        script = (
            "import time; open('/proc/self/comm', 'w').write('gcs_server'); print('up', flush=True); time.sleep(60)"
        )
        started.append(processes.python(script, os.environ[guardian.MARK])[0])

    monkeypatch.setattr(ray, "init", init)
    fake = fakes.fake_ray()
    vars(ray).update(wait=fake.wait, get=fake.get, exceptions=fake.exceptions)
    with Cluster() as cluster:
        assert int(os.environ[RECONNECT]) > 3600
        waiting: Future[Any] = Future()
        call = ActorCall(waiting, cluster.require_services)
        assert not call.poll(0.01)
        started[0].kill()
        started[0].wait()
        with pytest.raises(UserError, match="Ray's gcs_server has ended") as caught:
            call.poll(0.01)
        assert "run the command again" in caught.value.hint
        waiting.set_exception(fakes.ActorDiedError("socket closed"))
        with pytest.raises(UserError, match="Ray's gcs_server has ended"):
            call.result()
        answered: Future[Any] = Future()
        answered.set_result(7)
        assert ActorCall(answered, cluster.require_services).poll(0.01), "what is there already is taken"


def test_ray_says_nothing_on_standard_output(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be in the middle of what --json prints."""
    worker: Any = ModuleType("ray._private.worker")
    worker.print_to_stdstream = print
    monkeypatch.setitem(sys.modules, worker.__name__, worker)
    with Cluster():
        worker.print_to_stdstream({"lines": ["a worker died"]}, ignore_prefix=False)
    assert capsys.readouterr().out == ""
