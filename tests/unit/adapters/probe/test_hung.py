"""Wrappers come off in the reverse order, and leave objects as they were."""

from __future__ import annotations

import torch
from torch import nn

from adapters.probe.hung import Hung


class Thing:
    def value(self) -> int:
        return 1


def test_all_comes_off_again() -> None:
    hung, thing = Hung(), Thing()
    layer = nn.Linear(2, 2)
    first = thing.value
    hung.put(thing, "value", lambda: first() + 1)
    second = thing.value
    hung.put(thing, "value", lambda: second() * 10)
    hung.put(layer, "forward", lambda x: x)
    assert thing.value() == 20 and torch.equal(layer(torch.ones(1, 2)), torch.ones(1, 2))
    hung.remove()
    assert thing.value() == 1 and vars(thing) == {} and "forward" not in vars(layer)
    hung.remove()
    assert thing.value() == 1
