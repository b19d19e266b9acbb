"""Calls of tapped functions are noted once per phase, layers that are alike together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from adapters.probe.arguments import describe
from adapters.probe.callbook import CallBook, Tapped
from adapters.probe.watch import Watch
from align.trace.calls import Argument, Call, FloatOperator

NAMES = ["x", "weight", "residual"]


def norm(book: CallBook, layer: int | None, width: int = 4, kinds: tuple[str, ...] = ("mid", "mlp_norm")) -> None:
    book.enter(
        Tapped("m:Norm.forward", "m.py:3", kinds, tuple(NAMES)), layer, (torch.zeros(2, width),), {"residual": None}
    )
    book.leave()


def step(book: CallBook, number: int, phase: str, layers: tuple[int | None, ...] = (0, 1)) -> tuple[Call, ...]:
    book.begin(number, phase, rows=2)
    for layer in layers:
        norm(book, layer)
    return book.end()[0]


def test_the_first_step_of_each_phase_is_noted() -> None:
    book = CallBook()
    (found,) = step(book, 0, "prefill")
    assert (found.phase, found.step, found.rows, found.layers) == ("prefill", 0, 2, (0, 1))
    assert (found.where, found.place, found.kinds) == ("m:Norm.forward", "m.py:3", ("mid", "mlp_norm"))
    assert [one.phase for one in step(book, 1, "decode")] == ["decode"]
    assert step(book, 2, "decode") == ()
    assert step(book, 3, "prefill") == ()


def test_layers_that_differ_stand_apart() -> None:
    book = CallBook()
    book.begin(0, "prefill", 2)
    norm(book, 0)
    norm(book, 1, width=6)
    norm(book, 2)
    found, _ = book.end()
    assert [(one.layers, one.arguments[0].shape) for one in found] == [((0, 2), (2, 4)), ((1,), (2, 6))]


def test_what_runs_inside_is_known_and_ends() -> None:
    book = CallBook()
    book.begin(0, "prefill", 2)
    seen = [book.inside]
    book.enter(Tapped("m:outer", "", ("attn.out",), ()), 1, (), {})
    seen.append(book.inside)
    book.enter(Tapped("m:inner", "", ("attn.key_states", "attn.value_states"), ()), 1, (), {})
    seen.append(book.inside)
    book.leave()
    seen.append(book.inside)
    book.leave()
    seen.append(book.inside)
    outer, inner = ("layers.1.attn.out",), ("layers.1.attn.key_states", "layers.1.attn.value_states")
    assert seen == [(), outer, inner, outer, ()]


def test_device_operators_inside_are_noted_with_the_schemas_names() -> None:
    book = CallBook()
    watch = Watch(book, "meta")
    book.begin(0, "prefill", 3)
    watch.begin(0, "prefill")
    x, weight = torch.empty(3, 4, device="meta"), torch.empty(5, 4, device="meta")
    with torch.inference_mode(), watch.watching():
        torch.nn.functional.silu(x)  # outside every tapped call
        book.enter(Tapped("m:linear", "", ("mlp.down",), ("x",)), 0, (x,), {})
        torch.nn.functional.linear(x, weight).view(-1)
        book.leave()
    calls, operators = book.end()
    (inside,) = calls[0].operators
    assert inside.name == "aten::linear"
    assert [(one.name, one.shape) for one in inside.arguments] == [("input", (3, 4)), ("weight", (5, 4))]
    assert "test_callbook.py:" in inside.at[0]
    used: dict[str, FloatOperator] = {one.name: one for one in operators}
    assert {"aten::silu", "aten::linear"} <= used.keys()
    assert used["aten::silu"].inside == ()
    assert used["aten::linear"].inside == ("layers.0.mlp.down",)


def test_arguments_in_the_order_of_the_signature() -> None:
    held = SimpleNamespace(lengths=torch.zeros(3, dtype=torch.int32), note="x")
    found = describe(
        ["q", "caches", "meta", "scale", "out"],
        (torch.zeros(2, 6, dtype=torch.bfloat16).t(), [torch.zeros(1), torch.zeros(2)]),
        {"out": None, "scale": 0.5, "meta": held},
    )
    assert [(one.name, one.type) for one in found] == [
        ("q", "Tensor"), ("caches.0", "Tensor"), ("caches.1", "Tensor"), ("meta", "SimpleNamespace"),
        ("meta.lengths", "Tensor"), ("scale", "float"),
    ]  # fmt: skip
    assert found[0] == Argument("q", "Tensor", "bfloat16", (6, 2), (1, 6), "cpu")
    assert found[-1].value == "0.5"


def test_a_list_of_numbers_is_told_as_far_as_it_fits() -> None:
    (found,) = describe(["lengths"], (list(range(20)),), {})
    assert (found.type, found.value) == ("list", "0, 1, 2, 3, 4, 5, 6, 7, … (20)")


class Unreadable:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not to be looked at")


def test_an_argument_that_cannot_be_described_stops_nothing() -> None:
    book = CallBook()
    book.begin(0, "prefill", 2)
    book.enter(Tapped("m:odd", "", ("mid",), ("x",)), 0, (Unreadable(),), {})
    assert book.inside == ("layers.0.mid",)
    book.leave()
    assert book.end()[0] == ()
    assert "not to be looked at" in book.failures["m:odd"]
