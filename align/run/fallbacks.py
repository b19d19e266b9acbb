"""Operators that torch_npu says it ran on the host, from an engine's log.

torch_npu's fallback kernel warns once per operator and process: ``CAUTION: The operator 'aten::X' is not currently
supported on the NPU backend and will fall back to run on the CPU`` (function npu_cpu_fallback). Where the warning came
through Python, the line begins with the file and line that called it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LOG = "engine.log"
_WARNING = re.compile(
    r"(?:(?P<place>\S+\.py:\d+): UserWarning: )?.*?CAUTION: The operator '(?P<operator>[^']+)' is not currently "
    r"supported on the NPU backend and will fall\s?back to run on the CPU"
)
_KEPT = 300


def read_fallbacks(directory: Path) -> list[dict[str, Any]]:
    """``operator``, ``place`` (``file:line`` or empty), ``line`` and ``count`` of each operator in a side's log."""
    try:
        text = (directory / LOG).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return parse_fallbacks(text)


def parse_fallbacks(text: str) -> list[dict[str, Any]]:
    """The same, from the text of a log."""
    found: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        match = _WARNING.search(line)
        if match is None:
            continue
        operator, place = match["operator"], match["place"] or ""
        entry = found.setdefault(
            operator, {"operator": operator, "place": "", "line": line.strip()[:_KEPT], "count": 0}
        )
        entry["count"] += 1
        entry["place"] = entry["place"] or place
    return list(found.values())
