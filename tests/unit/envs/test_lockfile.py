"""Locks: what they pin, and that the key follows all that decides an environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs import lockfile
from envs.build import NAMES
from envs.errors import EnvError
from tests.unit.envs.fakes import LOCK, write_lock


@pytest.mark.parametrize("name", NAMES)
def test_committed_locks_pin_every_package_once(name: str) -> None:
    lock = lockfile.load(name)
    packages = [package.partition("==")[0].lower() for step in lock.steps for package in step.packages]
    assert lock.name == name
    assert lock.steps[0].name == "torch"
    assert len(packages) == len(set(packages))


def test_all_environments_share_what_must_be_equal_across_them() -> None:
    locks = [lockfile.load(name) for name in NAMES]
    # Ray refuses to join interpreters of different Ray versions.
    assert {lock.versions["ray"] for lock in locks} == {"2.60.0"}
    assert {lock.versions["torch"] for lock in locks} == {"2.13.0"}


def test_engines_are_the_published_versions() -> None:
    lmdeploy, vllm = lockfile.load("lmdeploy").versions, lockfile.load("vllm").versions
    assert (lmdeploy["lmdeploy"], lmdeploy["dlinfer-ascend"]) == ("0.12.2", "0.2.7")
    assert (vllm["vllm"], vllm["vllm-ascend"]) == ("0.23.0", "0.23.0")
    # Its mere presence would send both engines down other paths.
    assert "triton" not in {**lmdeploy, **vllm}


def test_key_changes_with_each_thing_that_decides_the_content(tmp_path: Path) -> None:
    def key(text: str, python: str = "3.11.7", machine: str = "x86_64") -> str:
        return lockfile.load("tiny", write_lock(tmp_path, text)).key(python, machine)

    base = key(LOCK)
    others = [
        key(LOCK.replace("one==1.0", "one==1.1")),
        key(LOCK + "\n# a comment\n"),
        key(LOCK, python="3.11.8"),
        key(LOCK, machine="aarch64"),
        key(LOCK.replace('"cpu"', '"cu130"')),
    ]
    assert key(LOCK) == base
    assert len({base, *others}) == 1 + len(others)


def test_pip_arguments_install_nothing_that_is_not_listed() -> None:
    for name in NAMES:
        for step in lockfile.load(name).steps:
            arguments = step.pip_arguments(Path("/site"), "x86_64")
            assert arguments[0] == "install"
            assert "--no-deps" in arguments
            assert arguments[-len(step.packages) :] == list(step.packages)


def test_source_build_is_neither_isolated_nor_a_wheel() -> None:
    (step,) = (step for step in lockfile.load("vllm").steps if "vllm==0.23.0" in step.packages)
    arguments = step.pip_arguments(Path("/site"), "x86_64")
    assert "--no-build-isolation" in arguments
    assert arguments[arguments.index("--no-binary") + 1] == "vllm"
    assert step.env == {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "0.23.0"}


def test_foreign_wheels_are_chosen_by_machine() -> None:
    (step,) = (step for step in lockfile.load("vllm").steps if step.name == "vllm-ascend")
    assert "manylinux_2_34_aarch64" in step.pip_arguments(Path("/site"), "aarch64")
    with pytest.raises(EnvError, match="fits this machine") as caught:
        step.pip_arguments(Path("/site"), "riscv64")
    assert "aarch64, x86_64" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        LOCK.replace("one==1.0", "one>=1.0"),
        LOCK.replace("one==1.0", "one"),
        LOCK.replace("one==1.0", "./one.whl"),
        LOCK.replace('torch_build = "cpu"', ""),
        LOCK.replace("disk_mb = 1", 'disk_mb = "much"'),
        LOCK.replace("[[step]]", "[step"),
    ],
)
def test_damaged_lock_is_named_with_the_way_to_restore_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(EnvError, match=r"tiny\.toml is damaged") as caught:
        lockfile.load("tiny", write_lock(tmp_path, text))
    assert caught.value.hint.startswith("restore it: git checkout")


def test_unknown_environment_lists_the_known_ones() -> None:
    with pytest.raises(EnvError, match="no environment called 'sglang'") as caught:
        lockfile.load("sglang")
    assert "driver, lmdeploy, vllm" in caught.value.hint
