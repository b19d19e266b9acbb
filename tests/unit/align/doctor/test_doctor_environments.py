"""Environments: built as the lock says, changed, half built, absent, old."""

from __future__ import annotations

import fcntl
from pathlib import Path

from align.doctor.environments import examine, examine_older
from align.doctor.types import Check, Machine, Needs
from envs.build import MARKER
from tests.unit.align.doctor.fakes import machine
from tests.unit.envs.fakes import LOCK, write_lock
from tests.unit.envs.test_installed import install


def built(here: Machine, name: str) -> Path:
    """Build an environment with what its lock lists; returns its site-packages."""
    environment = here.builder.ensure(name)
    for package, version in environment.versions.items():
        install(environment.site_packages, package, version, {f"{package}/a.py": "a"})
    return environment.site_packages


def found(here: Machine) -> dict[str, Check]:
    return {check.name.removesuffix(" environment"): check for check in examine(here, Needs())}


def test_not_built(tmp_path: Path) -> None:
    seen = found(machine(tmp_path))
    assert {name: (check.state, check.mend) for name, check in seen.items()} == {
        name: ("missing", f"align env build {name}") for name in ("driver", "lmdeploy", "vllm")
    }


def test_built_as_the_lock_says(tmp_path: Path) -> None:
    here = machine(tmp_path)
    write_lock(here.builder.locks, LOCK.replace("tiny", "vllm").replace("one==1.0", "ray==2.60.0"), "vllm")
    built(here, "vllm")
    check = found(here)["vllm"]
    assert (check.state, check.mend) == ("ok", "")
    assert check.found == f"{here.builder.environment('vllm').key[:12]}: ray 2.60.0"


def test_changed_since_it_was_built(tmp_path: Path) -> None:
    here = machine(tmp_path)
    site = built(here, "vllm")
    (site / "two" / "a.py").write_text("print('here')")
    changed = found(here)["vllm"]
    assert (changed.state, changed.mend) == ("missing", "align env build vllm --rebuild")
    assert changed.found == "changed: two: two/a.py is gone or was changed"
    next(site.glob("one-*/METADATA")).write_text("Name: one\nVersion: 1.1\n")
    assert "one is 1.1, the lock says 1.0" in found(here)["vllm"].found


def test_many_changes_are_counted(tmp_path: Path) -> None:
    here = machine(tmp_path)
    packages = ", ".join(f'"p{number}==1"' for number in range(9))
    write_lock(here.builder.locks, LOCK.replace("tiny", "vllm").replace('"one==1.0"', packages), "vllm")
    here.builder.ensure("vllm")
    assert found(here)["vllm"].found.endswith("p2 is not installed; 8 more")


def test_half_built_and_being_built(tmp_path: Path) -> None:
    here = machine(tmp_path)
    path = here.builder.ensure("lmdeploy").path
    (path / MARKER).unlink()
    half = found(here)["lmdeploy"]
    assert (half.state, half.found.startswith("half built"), half.mend) == ("missing", True, "align env build lmdeploy")
    with open(f"{path}.lock", "w") as lock:
        lock.write("77\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        busy = found(here)["lmdeploy"]
    assert (busy.state, busy.found) == ("missing", "being built by process 77")
    assert busy.mend.startswith("align env build lmdeploy  # waits")


def test_the_driver_that_this_command_runs_in(tmp_path: Path) -> None:
    here = machine(tmp_path)
    built(here, "driver")
    other = found(here)["driver"]
    assert (other.state, str(tmp_path / "elsewhere") in other.found) == ("warning", True)
    own = machine(tmp_path, prefix=here.builder.environment("driver").path)
    assert found(own)["driver"].state == "ok"


def test_on_hardware_the_engines_environments_are_not_ours(tmp_path: Path) -> None:
    assert set(found(machine(tmp_path, device="ascend"))) == {"driver"}


def test_older_environments(tmp_path: Path) -> None:
    here = machine(tmp_path)
    here.builder.ensure("vllm")
    (none,) = examine_older(here, Needs())
    assert (none.state, none.found) == ("ok", "none")
    old = here.home / "envs" / "vllm-0123456789ab"
    old.mkdir()
    (old / "file").write_bytes(b"x" * 3_000_000)
    (some,) = examine_older(here, Needs())
    assert (some.state, some.found, some.mend) == ("warning", "3 MB in vllm-0123456789ab", "align env clean --old")
