"""``align next``: the two recordings that tell more, for sides that are recorded apart."""

from __future__ import annotations

import json as plain_json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from adapters.base import SIDES
from align.cli.output import print_json
from align.errors import EXIT_ALIGNED, UserError
from align.report import terminal
from align.run.offline import Offline
from align.run.resume import look_left
from align.run.traces import find_trace, sides_of
from align.walk.planner import Look


def execute(candidate: Path, reference: Path | None, allow: tuple[str, ...], json: bool) -> int:
    """Print the commands, and return the exit code.

    Raises:
        UserError: the recordings cannot be compared, or are no traces.
    """
    console = Console(stderr=json, soft_wrap=True, emoji=False, highlight=False)
    paths = {role: find_trace(path) for role, path in zip(SIDES, sides_of(candidate, reference), strict=True)}
    offline = Offline(allow, "derived")
    compared = offline.run(paths)
    report, manifests = compared.report, offline.manifests
    left = look_left(offline, paths, "derived")
    look = left.look
    commands = [] if look is None else [_command(role, paths, manifests, look) for role in SIDES]
    console.print(terminal.sentence(*compared.engines, report), markup=False)
    if report.alone is not None:
        again = "shows" if report.alone.reproduced else "does not show"
        console.print(f"recorded already: {report.alone.request} by itself, which {again} it", markup=False)
    elif left.why:
        console.print(left.why, markup=False)
    if look is None:
        console.print("nothing more has to be recorded", markup=False)
        console.print(f"next: {terminal.next_step(report)}", markup=False)
    else:
        who = f"request {look.requests[0]} by itself" if look.requests else "the whole batch again"
        console.print(f"to record: {who}, with the values that tell more of {look.checkpoint}", markup=False)
    for command in commands if not json else ():
        print(command)
    if look is not None and not json:
        print(f"align compare {_next(paths['candidate'])} {_next(paths['reference'])}")
    if json:
        print_json(
            {
                "verdict": report.verdict,
                "findings": [finding.to_dict() for finding in report.findings],
                "look": None if look is None else look.to_dict(),
                "commands": commands,
            }
        )
    return EXIT_ALIGNED


def _next(trace: Path) -> str:
    """Where the next recording goes: beside the last one."""
    return shlex.quote(str(_named(trace)) + "-next")


def _named(trace: Path) -> Path:
    """The directory that users know: that of the side, if the trace lies in a run."""
    return trace.parent if trace.name == "trace" else trace


def _case_of(trace: Path) -> Path:
    """The case file of a recording.

    Raises:
        UserError: it was not copied along.
    """
    for directory in (trace, *trace.parents[:2]):
        if (directory / "case.json").is_file():
            return directory / "case.json"
    raise UserError(f"{trace} has no case.json beside it", "copy the whole directory that align capture made")


def _command(role: str, paths: Mapping[str, Path], manifests: Mapping[str, Mapping[str, Any]], look: Look) -> str:
    content = manifests[role]
    spec: Mapping[str, Any] = content.get("spec") or {}
    words = ["align", "capture", str(content["engine"]), "--side", role, "--case", str(_case_of(paths[role]))]
    words += ["--along", str(_named(paths["reference"]))]
    for request in look.requests:
        words += ["--only", request]
    for pattern in look.values:
        words += ["--capture", pattern]
    for name, value in (spec.get("options") or {}).items():
        words += ["--set", f"{name}={value if isinstance(value, str) else plain_json.dumps(value)}"]
    for patch in spec.get("patches") or ():
        words += ["--patch", str(patch)]
    if spec.get("device", "simnpu") != "simnpu":
        words += ["--device", str(spec["device"])]
    return shlex.join([*words, "--out"]) + " " + _next(paths[role])
