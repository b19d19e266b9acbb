"""The drill's summary as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def render(summary: Mapping[str, Any]) -> str:
    """The text of ``drill.md``."""
    environment = Environment(  # Markdown, not HTML: nothing is escaped
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        autoescape=False,
        keep_trailing_newline=True,
    )
    text = environment.get_template("report.md.jinja").render(
        cell=cell,
        number=number,
        **{"limits": (), "clean": (), "versions": {}, "differences": {}, "wanted": {}, **summary},
    )
    lines = [line.rstrip() for line in text.split("\n")]
    kept = [line for at, line in enumerate(lines) if line or (at and lines[at - 1])]
    return "\n".join(kept).strip() + "\n"


def cell(rate: Mapping[str, Any]) -> str:
    """``98.0 % (94.1 to 99.6)``; of nothing a dash."""
    if rate["share"] is None:
        return "–"
    return f"{100 * rate['share']:.1f} % ({100 * rate['low']:.1f} to {100 * rate['high']:.1f})"


def number(value: float | None) -> str:
    """Six significant digits; a dash for none."""
    return "–" if value is None else f"{value:.6g}"
