"""The environments that the driver and the engines run in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from align.doctor.types import Check, Machine, Needs, gb
from envs import survey
from envs.build import NAMES
from envs.home import REPOSITORY
from envs.installed import Departure

#: Named in an answer, when they are in the lock.
MAIN_PACKAGES = ("torch", "transformers", "ray", "lmdeploy", "dlinfer-ascend", "vllm", "vllm-ascend")

_SHOWN = 3


def examine(machine: Machine, needs: Needs) -> Iterator[Check]:
    """Those of this checkout's locks; on hardware only the driver's is ours."""
    names = NAMES if machine.device == "simnpu" else ("driver",)
    for found in survey.survey(machine.builder, names):
        if found.current and found.state != "built":
            yield unfinished(found)
        elif found.current:
            different = survey.departures_of(machine.builder, found.name)
            versions = machine.builder.environment(found.name).versions
            yield built(found, different, versions, machine.prefix)


def unfinished(found: survey.Found) -> Check:
    """One that is not built."""
    name = f"{found.name} environment"
    build = f"align env build {found.name}"
    if found.state == "building":
        who = "" if found.holder is None else f" by process {found.holder}"
        return Check(name, "missing", f"being built{who}", f"{build}  # waits for that build")
    if found.state == "unfinished":
        return Check(name, "missing", "half built: a build was stopped, or its Python was removed", build)
    return Check(name, "missing", f"not built for this lock ({found.key})", build)


def built(found: survey.Found, different: tuple[Departure, ...], versions: dict[str, str], prefix: Path) -> Check:
    """Args: what is not as in the lock, the lock's versions, and where this command runs."""
    name = f"{found.name} environment"
    if different:
        shown = "; ".join(map(str, different[:_SHOWN]))
        more = f"; {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        return Check(name, "missing", f"changed: {shown}{more}", f"align env build {found.name} --rebuild")
    if found.name == "driver" and prefix.resolve() != found.path.resolve():
        return Check(name, "warning", f"built, but this command runs in {prefix}", f"make -C {REPOSITORY} path")
    main = ", ".join(f"{package} {versions[package]}" for package in MAIN_PACKAGES if package in versions)
    return Check(name, "ok", f"{found.key}: {main}")


def examine_older(machine: Machine, needs: Needs) -> Iterator[Check]:
    """Environments of other locks: space that can be freed, unless another checkout uses them."""
    older = survey.others(machine.builder)
    if not older:
        yield Check("older environments", "ok", "none")
        return
    size = sum(survey.size(found.path) for found in older)
    names = ", ".join(found.path.name for found in older)
    yield Check("older environments", "warning", f"{gb(size)} in {names}", "align env clean --old")
