"""The driver's interpreter and the kind of machine."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from align.doctor.types import Check, Machine, Needs
from envs import lockfile
from envs.build import NAMES

#: Minor version that the engines' packages are published for.
VERSION = (3, 11)


def examine(machine: Machine, needs: Needs) -> Iterator[Check]:
    """Version, the modules that make environments, and operating system with processor."""
    yield python(sys.version_info[:3], sys.executable, [name for name in ("venv", "ensurepip") if not find_spec(name)])
    # On ascend the engines are installed already.
    locks = [lockfile.load(name, machine.builder.locks) for name in NAMES] if machine.device == "simnpu" else []
    published = [set(step.platforms) for lock in locks for step in lock.steps if step.platforms]
    yield system(platform.system(), platform.machine(), set.intersection(*published) if published else None)


def python(version: tuple[int, ...], executable: str, absent: list[str]) -> Check:
    """``absent``: modules without which no environment can be made."""
    text = ".".join(map(str, version))
    if version[:2] != VERSION:
        found = f"{text} at {executable}; 3.11 is needed"
        return Check("Python", "missing", found, "PYTHON=/path/to/python3.11 make env")
    if absent:
        found = f"{text} without {' and '.join(absent)}: no environment can be built with it"
        return Check(
            "Python", "warning", found, "apt-get install python3.11-venv  # or another one: PYTHON=/path make env"
        )
    return Check("Python", "ok", f"{text} at {executable}")


def system(name: str, processor: str, published: set[str] | None) -> Check:
    """``published``: processors that all engines' packages exist for; ``None`` if that does not matter."""
    if name != "Linux":
        return Check("system", "missing", f"{name}; Linux is needed", "run in a Linux container or virtual machine")
    if published is not None and processor not in published:
        known = " or ".join(sorted(published))
        found = f"Linux on {processor}; the engines' packages are for {known}"
        return Check("system", "missing", found, f"use a machine with {known}")
    return Check("system", "ok", f"Linux on {processor}")
