"""The command that makes the same run again, with every option that changes it, and what a side alone ran with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from align.result.schema import Result
from align.run.plan import SIMULATED
from align.sentences import Said, said

#: Options of ``align run`` that change what it does, beside those that its case, its patches and its device say.
WITH_VALUE = (
    "--allow", "--policy", "--floor", "--min-coverage", "--capture", "--values-budget", "--replay", "--confirm",
    "--replay-routing",
    "--launch-timeout", "--step-timeout", "--layouts", "--min-tp", "--device-memory",
)  # fmt: skip
FLAGS = ("--lean", "--no-tensors", "--no-confirm", "--no-audit", "--no-fa", "--fresh", "--ladder", "--no-ladder")


def command_again(result: Result) -> list[str] | None:
    """The words of the command; ``None`` if there is no case on disk."""
    directory = result.environment.directory
    if directory is None or result.case is None or result.source != "run":
        return None
    words = ["align", "run", "--case", f"{directory}/case.json"]
    device = next((one.about.get("device") for one in result.facts if one.name == "hardware"), None)
    words += ["--device", str(device)] if device not in (None, SIMULATED) else []
    for side, files in result.environment.patches.items():
        words += [word for file in files for word in ("--patch", f"{side}={file}")]
    for one in result.measures:
        if one.kind == "option":
            words += ["--set", f"{one.side}.{one.file}={json.dumps(one.value, ensure_ascii=False)}"]
    pairs = list(_kept(result.environment.argv))
    # What was decided on the way, or by a version that kept no command.
    pairs += [("--allow", one.name) for one in result.conditions if one.allowed]
    if result.tensors is not None and result.tensors.policy == "seed":
        pairs.append(("--policy", "seed"))
    return words + [word for pair in dict.fromkeys(pairs) for word in pair]


def _kept(argv: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The options of a command as it was typed that change the run: ``("--lean",)``, ``("--floor", "none")``."""
    words = iter(argv)
    for word in words:
        name, given, value = word.partition("=")
        if word in FLAGS:
            yield (word,)
        elif name in WITH_VALUE:
            yield name, value if given else next(words, "")


def measures(patches: Mapping[str, Sequence[str]], options: Mapping[str, Sequence[str]]) -> list[Said]:
    """What each side alone ran with, as sentences.

    Args:
        patches: by side, paths of the files.
        options: by side, names.
    """
    found = []
    for kind, plural, given in (("patch", "patches", patches), ("option", "options", options)):
        for side, values in given.items():
            names = [PurePath(one).name if kind == "patch" else one for one in values]
            if names:
                found.append(said(f"measured.{kind if len(names) == 1 else plural}", side=side, names=names))
    return found


def suspects(patches: Sequence[str], side: str | None, place: str = "") -> Said | None:
    """That the accused side ran with patches; ``None`` if it did not, or if ``place``, where to read, is in one."""
    if not patches or side is None or any(place.startswith(one) for one in patches):
        return None
    key = "measured.suspect" if len(patches) == 1 else "measured.suspects"
    return said(key, side=side, names=[PurePath(one).name for one in patches])


def measures_of(result: Result) -> list[Said]:
    """The same of a result."""
    options: dict[str, list[Any]] = {}
    for one in result.measures:
        if one.kind == "option":
            options.setdefault(one.side, []).append(one.file)
    patches = dict(result.environment.patches)
    for one in result.measures:  # of another version
        if one.kind == "patch" and one.side not in result.environment.patches:
            patches.setdefault(one.side, []).append(one.file)
    return measures(patches, options)
