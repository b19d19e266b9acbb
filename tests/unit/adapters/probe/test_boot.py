"""The hooks' way into every process: a finder armed by torch's entry point."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from adapters import probe
from adapters.probe import boot
from envs.home import REPOSITORY


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fake engine and its hooks, and finders that go away afterwards."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("")
    (tmp_path / "engine" / "runner.py").write_text("import engine.other\nRUNS = ['runner']\n")
    (tmp_path / "engine" / "other.py").write_text("RUNS = ['other']\n")
    (tmp_path / "engine_hooks.py").write_text(
        "SEEN = []\n\ndef install(module):\n    SEEN.append((module.__name__, list(module.RUNS)))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(boot, "HOOKS", {"engine.runner": "engine_hooks", "engine.other": "engine_hooks"})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("ALIGN_PROBE_DIR", str(tmp_path))
    yield tmp_path
    for name in ("engine", "engine.runner", "engine.other", "engine_hooks"):
        sys.modules.pop(name, None)


def finders() -> list[object]:
    return [finder for finder in sys.meta_path if isinstance(finder, boot._AfterImport)]


def test_nothing_is_armed_without_a_directory(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALIGN_PROBE_DIR")
    boot.autoload()
    assert finders() == []
    importlib.import_module("engine.runner")
    assert "engine_hooks" not in sys.modules


def test_arming_twice_is_arming_once(modules: Path) -> None:
    boot.autoload()
    boot.autoload()
    assert len(finders()) == 1
    assert sys.meta_path[0] is finders()[0]


def test_hooks_see_each_module_once_after_it_ran(modules: Path) -> None:
    boot.autoload()
    assert "engine_hooks" not in sys.modules, "arming imports nothing"
    runner = importlib.import_module("engine.runner")
    importlib.import_module("engine.runner")
    seen = importlib.import_module("engine_hooks").SEEN
    assert seen == [("engine.other", ["other"]), ("engine.runner", ["runner"])]
    importlib.reload(runner)
    assert seen[2:] == [("engine.runner", ["runner"])], "a reload runs the module again, and its hooks once"


def test_asking_about_a_module_is_not_importing_it(modules: Path) -> None:
    boot.autoload()
    assert importlib.util.find_spec("engine.runner") is not None
    assert importlib.util.find_spec("engine.missing") is None
    assert "engine_hooks" not in sys.modules


def test_a_missing_engine_stays_missing(modules: Path) -> None:
    (modules / "engine" / "runner.py").unlink()
    boot.autoload()
    with pytest.raises(ModuleNotFoundError, match=r"engine\.runner"):
        importlib.import_module("engine.runner")


def test_a_failing_hook_is_not_hidden(modules: Path) -> None:
    (modules / "engine_hooks.py").write_text("def install(module):\n    raise LookupError('no such class')\n")
    boot.autoload()
    with pytest.raises(LookupError, match="no such class"):
        importlib.import_module("engine.other")


def test_every_hook_is_a_module_with_an_install_function() -> None:
    for ours in boot.HOOKS.values():
        source = REPOSITORY.joinpath(*ours.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        assert "\ndef install(" in source


def test_the_path_holds_nothing_but_entry_points() -> None:
    (found,) = metadata.distributions(path=[str(probe.PATH)])
    assert found.metadata["Name"] == "align-probe"
    points = {point.group: point.value for point in found.entry_points}
    assert points == {
        "torch.backends": "adapters.probe.boot:autoload",
        "vllm.general_plugins": "adapters.vllm.plugin:register",
    }
    assert boot.autoload is next(iter(found.entry_points.select(group="torch.backends"))).load()
    (folder,) = (path for path in probe.PATH.iterdir() if path.name != "__pycache__")
    assert folder.name.endswith(".dist-info")


def test_torch_arms_the_finder_in_a_new_process(tmp_path: Path) -> None:
    script = (
        "import torch, sys; from adapters.probe import boot; "
        "print(sum(isinstance(finder, boot._AfterImport) for finder in sys.meta_path))"
    )
    path = os.pathsep.join([str(REPOSITORY), str(probe.PATH)])
    counts = []
    for extra in ({"ALIGN_PROBE_DIR": str(tmp_path)}, {}):
        inherited = {name: value for name, value in os.environ.items() if name != "ALIGN_PROBE_DIR"}
        env = {**inherited, "PYTHONPATH": path, **extra}
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
        counts.append(done.stdout.strip())
    assert counts == ["1", "0"]
