"""The conditions of the rules: pure functions of a :class:`align.fa.view.View`.

The tables name them ``module.function``. A condition answers *fires* with the facts of its message, *holds*, *absent*
(it is not about such a call) or *unknown*. The rule's scope was looked at before.
"""

from __future__ import annotations

from collections.abc import Callable

from align.fa.conditions import layout, lengths, mask, mla, paged, precision, quant, scale, tensors, version, write
from align.fa.outcome import Outcome
from align.fa.view import View

_MODULES = {
    one.__name__.rpartition(".")[2]: one
    for one in (layout, lengths, mask, mla, paged, precision, quant, scale, tensors, version, write)
}


def named(name: str) -> Callable[[View], Outcome]:
    """``mask.missing`` → the function."""
    module, _, function = name.partition(".")
    found: Callable[[View], Outcome] = getattr(_MODULES[module], function)
    return found
