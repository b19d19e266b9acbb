"""``align isolate``: ``align run`` with its ladder, whatever the target's verdict. Its options are those of the run."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

from align.cli.commands import run_command


def isolate_command(**options: Any) -> None:
    """Say which parallel dimension introduces a divergence: TP, DP, EP or none.

    Runs the case at the asked layout, then at simpler ones, from the simplest that fits the device up: (smallest TP)
    → (tp) → (tp, dp) → (tp, dp, ep). It stops at the first that diverges. A layout that an engine cannot run is not
    comparable, with its error. Where a dimension introduced the fault, the accused engine is compared with itself at
    the simpler layout. Each layout is an ordinary run in ladder/ of the run directory. The exit code is that of the
    asked layout. All options are those of `align run`.

    Examples: `align isolate --tp 2` · `align isolate --tp 2 --dp 2 --patch candidate=fix.py` ·
    `align isolate --layouts "tp1, tp2, tp2 dp2"` · `align run --tp 2 --against self` (one engine alone)
    """
    run_command(**options, ladder=True)


def _same_options() -> None:
    """Give the command the signature of the run's, without the option that it is about."""
    hints = get_type_hints(run_command, include_extras=True)
    left_out = ("ladder", "no_ladder", "against")
    given = inspect.signature(run_command).parameters.values()
    kept = [one.replace(annotation=hints[one.name]) for one in given if one.name not in left_out]
    isolate_command.__signature__ = inspect.Signature(kept, return_annotation=None)  # type: ignore[attr-defined]
    isolate_command.__annotations__ = {one.name: one.annotation for one in kept} | {"return": None}


_same_options()
