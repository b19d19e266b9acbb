"""What one side ran with that is no part of the case: the fixes that were tried.

A patch says in its docstring what it stands for; the file is parsed and never run here::

    \"\"\"One sentence on what changes.

    File: lmdeploy/pytorch/backends/dlinfer/norm.py
    Reason: the epsilon is added after the root.
    \"\"\"
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from adapters.base import SIDES
from align.result.parts import Measure, Side
from align.result.plain import plain
from align.run.plan import SideExtras

#: Larger files are no patch that a person wrote.
_MAX_BYTES = 1 << 20
_FIELD = re.compile(r"^(file|change|reason):\s*(.*)$", re.IGNORECASE)


def measures_of(extras: Mapping[str, SideExtras]) -> list[Measure]:
    """Patches first, then options, side by side."""
    found = []
    for side in SIDES:
        given = extras.get(side, SideExtras())
        found += [_patch(_side(side), Path(file)) for file in given.patches]
        found += [
            Measure(
                side=_side(side),
                kind="option",
                file=name,
                value=plain(value),
                change=f"{name} = {json.dumps(plain(value), ensure_ascii=False)}",
                reason=None,
            )
            for name, value in given.options.items()
        ]
    return found


def _side(side: str) -> Side:
    return "candidate" if side == "candidate" else "reference"


def _patch(side: Side, path: Path) -> Measure:
    """What a patch says of itself, as far as it can be read."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("too large")
        content = path.read_bytes()
        fields = describe(ast.get_docstring(ast.parse(content)) or "")
    except (OSError, ValueError, SyntaxError, RecursionError):
        # Recorded elsewhere, or gone since: that it ran is known, what it says is not.
        return Measure(side=side, kind="patch", file=path.name, change=None, reason=None)
    return Measure(
        side=side,
        kind="patch",
        file=fields.get("file") or path.name,
        change=fields.get("change"),
        reason=fields.get("reason"),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def describe(docstring: str) -> dict[str, str]:
    """``file``, ``change`` and ``reason`` of a docstring, those that are there.

    Lines that begin with one of the names give it, following lines of the paragraph included; the first paragraph that
    gives none is the change, a second one the reason.
    """
    found: dict[str, str] = {}
    free: list[str] = []
    for paragraph in re.split(r"\n\s*\n", docstring.strip()):
        current = ""
        for line in paragraph.splitlines():
            match = _FIELD.match(line.strip())
            if match:
                current = match[1].lower()
                found[current] = match[2].strip()
            elif current:
                found[current] = f"{found[current]} {line.strip()}".strip()
            else:
                break
        if not current and paragraph.strip():
            free.append(" ".join(paragraph.split()))
    for name, text in zip(("change", "reason"), free, strict=False):
        found.setdefault(name, text)
    return {name: text for name, text in found.items() if text}
