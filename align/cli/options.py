"""Options that several commands have, from text to values."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal, cast, get_args

from adapters.base import SIDES, split_options
from align.case.schema import DTYPE_ALIASES, Case, Dtype, Numerics, load_case
from align.checkpoints.table import Structure
from align.cli.patch_file import checked_patch
from align.errors import UserError
from align.run.directory import CASE
from align.run.plan import SIMULATED, SideExtras
from align.run.recording import DEFAULT_BUDGET_MB, kept
from envs.profiles import PROFILES, Interpreter, resolve

NUMERICS = ("native", "fp32-internal")
POLICIES = ("derived", "seed")
DTYPES: tuple[str, ...] = get_args(get_args(Dtype)[0])


def check_seconds(**options: float) -> None:
    """Refuse what is no time. Options are named as in Python: ``launch_timeout``."""
    for name, seconds in options.items():
        option = "--" + name.replace("_", "-")
        if not (isfinite(seconds) and seconds > 0):
            raise UserError(f"{option} {seconds:g} is not a time", f"give seconds, for example {option} 600")


def check_counts(**options: int | None) -> None:
    """Refuse what counts nothing. Options are named as in Python; ``None`` means not given."""
    for name, count in options.items():
        if count is not None and count < 1:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} {count} is not possible: it is at least 1", f"give for example {option} 16")


def case_in(file: Path) -> Case:
    """``--case``.

    Raises:
        UserError: it is no case; where a run's directory was named, its file is.
    """
    if file.is_dir():
        inside = next((one / CASE for one in (file, file.parent) if (one / CASE).is_file()), None)
        hint = "give the case.json of a run" if inside is None else f"give its file: --case {inside}"
        raise UserError(f"{file} is a directory, and no case", hint)
    return load_case(file)


def dtype_of(text: str) -> str:
    """``--dtype``, by its full name.

    Raises:
        UserError: another dtype; says which there are.
    """
    name = DTYPE_ALIASES.get(text, text)
    if name in DTYPES:
        return name
    short = {one: next(alias for alias, full in DTYPE_ALIASES.items() if full == one) for one in DTYPES}
    raise UserError(
        f"--dtype {text} is not in this version: engines compute in {' or '.join(DTYPES)}, without quantisation",
        f"choose {' or '.join(f'{one} ({alias})' for one, alias in short.items())}, or leave --dtype out",
    )


def policy_name(text: str) -> Literal["derived", "seed"]:
    """``--policy``."""
    if text not in POLICIES:
        raise UserError(f"--policy {text} is not known", f"choose one of {', '.join(POLICIES)}")
    return cast(Literal["derived", "seed"], text)


def budget_bytes(megabytes: int | None) -> int:
    """``--values-budget`` in bytes."""
    given = DEFAULT_BUDGET_MB if megabytes is None else megabytes
    if given < 0:
        raise UserError(f"--values-budget {given} is not a size", "give megabytes, for example --values-budget 512")
    return given * 10**6


def check_patterns(patterns: Iterable[str], structure: Structure) -> None:
    """Refuse ``--capture`` patterns that no checkpoint of the model matches: they would keep nothing, silently."""
    names = [str(name) for name in structure.names()]
    for pattern in patterns:
        if not any(kept(name, (pattern,)) for name in names):
            raise UserError(
                f"--capture {pattern} matches none of the model's {len(names)} checkpoints",
                f"they are called {names[0]}, {names[1]}, … {names[-1]}: give for example --capture 'layers.0.*'",
            )


def numerics_of(texts: Iterable[str], device: str) -> Numerics:
    """``--numerics SIDE=NAME``."""
    chosen: dict[str, Any] = {}
    for text in texts:
        role, _, name = text.partition("=")
        if role not in SIDES or name not in NUMERICS:
            raise UserError(
                f"--numerics {text} is not SIDE=NAME",
                f"SIDE is one of {', '.join(SIDES)}, NAME one of {', '.join(NUMERICS)}",
            )
        chosen[role] = name
    if chosen and device != SIMULATED:
        raise UserError(f"--numerics belongs to the simulated NPU, not to {device}", "leave --numerics out")
    return Numerics(**chosen)


def extras_of(sets: Iterable[str], patches: Iterable[str]) -> dict[str, SideExtras]:
    """``--set SIDE.NAME=VALUE`` and ``--patch SIDE=FILE`` by role."""
    options: dict[str, dict[str, Any]] = {role: {} for role in SIDES}
    files: dict[str, list[str]] = {role: [] for role in SIDES}
    for text in sets:
        name, equals, value = text.partition("=")
        role, dot, option = name.partition(".")
        if not equals or not dot or role not in SIDES:
            raise UserError(
                f"--set {text} is not SIDE.NAME=VALUE",
                f"SIDE is one of {', '.join(SIDES)}, for example --set candidate.sampling.top_k=5",
            )
        _set(options[role], option, value, text)
    for text in patches:
        role, equals, file = text.partition("=")
        if not equals or role not in SIDES:
            raise UserError(
                f"--patch {text} is not SIDE=FILE",
                f"SIDE is one of {', '.join(SIDES)}, for example --patch candidate=fix.py",
            )
        files[role].append(checked_patch(file))
    return {role: SideExtras(options[role], tuple(files[role])) for role in SIDES}


def own_extras(sets: Iterable[str], patches: Iterable[str]) -> SideExtras:
    """``--set NAME=VALUE`` and ``--patch FILE`` of a command with one side."""
    options: dict[str, Any] = {}
    for text in sets:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {text} is not NAME=VALUE", "for example --set block_size=64")
        _set(options, name, value, text)
    return SideExtras(options, tuple(map(checked_patch, patches)))


def _set(options: dict[str, Any], name: str, value: str, text: str) -> None:
    """VALUE is JSON, or else a string."""
    if not name or name.startswith(".") or name.endswith("."):
        raise UserError(f"--set {text} names no option", "for example --set candidate.sampling.top_k=5")
    if name in options:
        raise UserError(f"--set gives {name} twice", "leave one of the two out")
    try:
        options[name] = json.loads(value)
    except ValueError:
        options[name] = value


def check_supported(device: str) -> None:
    """``--device``, before anything is started.

    Raises:
        UserError: a device that is not known or not supported.
    """
    known = [profile.name for profile in PROFILES.values() if profile.find is not None]
    if device not in known:
        raise UserError(f"the device {device!r} is not known or not supported", f"use one of: {', '.join(known)}")


def interpreters_for(
    case: Case, device: str, extras: Mapping[str, SideExtras], roles: Iterable[str] = SIDES
) -> dict[str, Interpreter]:
    """Where each side's engine runs, with what must be in its environment before it starts.

    With expert parallelism the simulated chip is of the generation on which lmdeploy has it, see
    :data:`align.layout.RULES`; on both sides, so that they stay comparable.
    """
    found = {}
    spread = any(one is not None and one.ep > 1 for one in (case.layout, case.reference_layout))
    for role in roles:
        interpreter = resolve(device, getattr(case, role))
        env = dict(interpreter.env)
        chosen = getattr(case.numerics, role)
        if chosen is not None:
            env["ALIGN_SIMNPU_NUMERICS"] = chosen
        if spread and device == SIMULATED:
            env["ALIGN_SIMNPU_SOC"] = os.environ.get("ALIGN_SIMNPU_SOC") or "A3"
        for name, value in split_options(extras.get(role, SideExtras()).options).env.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        found[role] = replace(interpreter, env=env)
    return found
