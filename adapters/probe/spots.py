"""Where in the model a rank is: which of the functions that yield checkpoints runs, in every forward.

The taps know it too, but only while a run is recorded. A collective has to be placed in any forward, also in a dummy,
so these wrappers do nothing but remember names.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

from adapters.probe.hung import Hung
from adapters.probe.taps import PSEUDO, Tap, resolve
from align.checkpoints.table import Structure, kinds


class Spots(threading.local):
    """Of this process; every thread has its own.

    Attributes:
        after: checkpoints of the function that ended last in this forward; empty if none did.
    """

    def __init__(self) -> None:
        self._running: list[tuple[str, ...]] = []
        self.after: tuple[str, ...] = ()

    @property
    def inside(self) -> tuple[str, ...]:
        """Checkpoints of the innermost function that runs; empty outside of any."""
        return self._running[-1] if self._running else ()

    def begin(self) -> None:
        """A forward is about to run."""
        self._running, self.after = [], ()

    def enter(self, names: tuple[str, ...]) -> None:
        """A function with these checkpoints is about to run."""
        self._running.append(names)

    def leave(self) -> None:
        """The function that was entered last has ended."""
        if self._running:  # a failed forward may have left it already
            self.after = self._running.pop()


def hang_spots(spots: Spots, taps: Sequence[Tap], root: Any, structure: Structure) -> Hung:
    """Wrap the sites of a model's checkpoints.

    What is not there is left out: the taps of the same table say so. An object that serves several layers tells
    nothing, and a function inside a site belongs to it.
    """
    sites: dict[tuple[int, str], tuple[Any, str, dict[str, None]]] = {}
    shared: set[tuple[int, str]] = set()
    layers: dict[tuple[int, str], int | None] = {}
    for tap in taps:
        if tap.checkpoint in PSEUDO or ">" in tap.attribute or not structure.has(kinds()[tap.checkpoint]):
            continue
        if not tap.holds(structure):
            continue
        for layer in (None,) if "{i}" not in tap.site else range(structure.layers):
            try:
                target = resolve(root, tap.site.replace("{i}", str(layer)))
                getattr(target, tap.attribute)
            except (AttributeError, LookupError, TypeError):
                continue
            key = (id(target), tap.attribute)
            if layers.setdefault(key, layer) != layer:
                shared.add(key)
            sites.setdefault(key, (target, tap.attribute, {}))[2][kinds()[tap.checkpoint].at(layer)] = None
    hung = Hung()
    for key, (target, attribute, names) in sites.items():
        if key not in shared:
            hung.put(target, attribute, placed(spots, getattr(target, attribute), tuple(names)))
    return hung


def placed(spots: Spots, original: Any, names: tuple[str, ...]) -> Any:
    """A function that says meanwhile that it runs, and yields these checkpoints."""

    @functools.wraps(original)
    def spotted(*args: Any, **kwargs: Any) -> Any:
        spots.enter(names)
        try:
            return original(*args, **kwargs)
        finally:
            spots.leave()

    return spotted


#: Where this process is.
here = Spots()
