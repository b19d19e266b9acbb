"""Reading the lock of an environment (``envs/locks/<name>.toml``)."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.errors import EnvError

LOCKS = Path(__file__).resolve().parent / "locks"

#: Part of every key: raise it when the way of building changes without a change of a lock.
BUILDER_FORMAT = "1"

_PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!]+")


@dataclass(frozen=True)
class Step:
    """One ``pip install --no-deps``.

    Attributes:
        name: shown to the user.
        packages: ``name==version`` each.
        env: environment variables for this step only.
        platforms: machine (``x86_64``) to pip platform tags, for wheels whose tag does not fit
            their pure content; empty for an ordinary installation.
        from_source: build from the source distribution in this environment (no build isolation).
        remove: paths below ``site-packages`` deleted afterwards.
    """

    name: str
    packages: tuple[str, ...]
    env: Mapping[str, str]
    platforms: Mapping[str, tuple[str, ...]]
    from_source: bool
    remove: tuple[str, ...]

    def pip_arguments(self, site_packages: Path, machine: str) -> list[str]:
        """Return the arguments after ``pip`` for an environment with this ``site_packages``.

        Raises:
            EnvError: the step has platform tags, but none for ``machine``.
        """
        arguments = ["install", "--no-deps", "--no-warn-script-location"]
        if self.from_source:
            names = ",".join(package.partition("==")[0] for package in self.packages)
            arguments += ["--no-build-isolation", "--no-binary", names]
        if self.platforms:
            if machine not in self.platforms:
                known = ", ".join(sorted(self.platforms))
                raise EnvError(f"no {self.name} package fits this machine ({machine})", f"use one of: {known}")
            arguments += ["--target", str(site_packages), "--upgrade", "--only-binary=:all:"]
            arguments += ["--python-version", "{}.{}".format(*sys.version_info[:2])]
            for tag in self.platforms[machine]:
                arguments += ["--platform", tag]
        return [*arguments, *self.packages]


@dataclass(frozen=True)
class Lock:
    """Everything that decides what an environment contains.

    Attributes:
        name: of the environment.
        torch_build: build of torch that is accepted, ``cpu``.
        disk_mb: free space needed to build it, in MB (1e6 bytes).
        imports: modules imported once after the build.
        steps: installations in order.
        digest: SHA-256 of the lock's bytes, hexadecimal.
    """

    name: str
    torch_build: str
    disk_mb: int
    imports: tuple[str, ...]
    steps: tuple[Step, ...]
    digest: str

    def key(self, python_version: str | None = None, machine: str | None = None) -> str:
        """Return the key (hexadecimal): lock, exact Python version, machine and build of torch."""
        parts = (
            BUILDER_FORMAT,
            self.digest,
            python_version or platform.python_version(),
            machine or platform.machine(),
            self.torch_build,
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def versions(self) -> dict[str, str]:
        """Pinned version of every package."""
        pins = (package.partition("==") for step in self.steps for package in step.packages)
        return {name: version for name, _, version in pins}


def _step(table: Mapping[str, Any]) -> Step:
    packages = tuple(table["packages"])
    loose = [package for package in packages if not _PINNED.fullmatch(package)]
    if loose:
        raise ValueError(f"not pinned as name==version: {', '.join(loose)}")
    return Step(
        name=table["name"],
        packages=packages,
        env=dict(table.get("env", {})),
        platforms={machine: tuple(tags) for machine, tags in table.get("platforms", {}).items()},
        from_source=bool(table.get("from_source", False)),
        remove=tuple(table.get("remove", ())),
    )


def load(name: str, directory: Path = LOCKS) -> Lock:
    """Read the lock called ``name``.

    Raises:
        EnvError: there is no such lock or it cannot be understood.
    """
    path = directory / f"{name}.toml"
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        known = ", ".join(sorted(file.stem for file in directory.glob("*.toml"))) or "none"
        raise EnvError(f"there is no environment called {name!r}", f"choose one of: {known}") from error
    except OSError as error:
        raise EnvError(f"cannot read {path}: {error.strerror}", "check out the repository again") from error
    try:
        table = tomllib.loads(raw.decode())
        return Lock(
            name=table["name"],
            torch_build=table["torch_build"],
            disk_mb=int(table["disk_mb"]),
            imports=tuple(table.get("imports", ())),
            steps=tuple(_step(step) for step in table["step"]),
            digest=hashlib.sha256(raw).hexdigest(),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EnvError(f"the lock {path} is damaged: {error}", f"restore it: git checkout -- {path}") from error
