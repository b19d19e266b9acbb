"""Run in an engine's own interpreter by test_taps.py: look every row of a tap table up in the installed packages.

Reads ``{"first": module, "models": [module:Class, …], "rows": [[checkpoint, attribute, where, pick], …]}`` and prints
``{checkpoint: errors}``.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys

from adapters.probe.taps import locate


def wrong(models: list[str], attribute: str, where: str, pick: str) -> list[str]:
    """What of a row the installed packages do not have."""
    found = []
    # A row for the model's own class must hold for every family.
    places = [where.replace("*:", f"{model}.") for model in models] if where.startswith("*:") else [where]
    inner = attribute.partition(">")[2]
    for place in dict.fromkeys([*places, *([inner] if inner else [])]):
        try:
            function = locate(place)
        except (AttributeError, ImportError) as error:
            found.append(f"{place}: {type(error).__name__}: {error}")
            continue
        parameters = inspect.signature(function).parameters
        names = [choice.split(".")[1] for choice in pick.split("|") if choice.startswith("in.")]
        found += [f"{place} has no parameter {name}" for name in names if name not in parameters]
    return found


def main() -> None:
    asked = json.load(sys.stdin)
    importlib.import_module(asked["first"])
    answer = {row[0]: wrong(asked["models"], *row[1:]) for row in asked["rows"]}
    print("\nALIGN" + json.dumps(answer))


main()
