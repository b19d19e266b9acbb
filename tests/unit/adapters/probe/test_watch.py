"""A host tensor that is computed in a step and moved is seen, with its call site; constants and integers are not."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from adapters.probe.callbook import CallBook, Tapped
from adapters.probe.watch import Watch
from align.trace.calls import HostMove

#: Stands for the engine's device: torch's meta device refuses to be mixed with the host as hardware does.
DEVICE = "meta"


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def watched(work: Any, book: CallBook | None = None) -> tuple[HostMove, ...]:
    watch = Watch(book or CallBook(), DEVICE)
    watch.begin(3, "decode")
    with torch.inference_mode(), watch.watching():
        work()
    assert watch.failures == {}
    return watch.end()


def test_what_is_computed_on_the_host_and_moved_is_seen_with_both_places() -> None:
    angles = torch.arange(6).float().reshape(2, 3)
    lines: list[int] = []

    def work() -> None:
        cos = angles.cos().to(torch.bfloat16)
        lines.append(line() - 1)
        cos.to(DEVICE)
        lines.append(line() - 1)

    (found,) = watched(work)
    assert (found.step, found.phase, found.computed, found.count) == (3, "decode", True, 1)
    assert (found.made_by, found.shape, found.dtype) == ("aten::cos", (2, 3), "bfloat16")
    assert found.made_at[0].endswith(f"test_watch.py:{lines[0]} work")
    assert found.moved_at[0].endswith(f"test_watch.py:{lines[1]} work")


@pytest.mark.parametrize(
    ("name", "move"),
    [
        ("copy_", lambda made: torch.empty(made.shape, device=DEVICE).copy_(made)),
        ("to of a slice", lambda made: made[1:].to(DEVICE)),
        ("after a cast", lambda made: made.half().to(DEVICE)),
        ("after a cat", lambda made: torch.cat((made, torch.zeros(2, 3))).to(DEVICE)),
        ("into a row", lambda made: torch.empty(4, 2, 3, device=DEVICE)[0].copy_(made)),
        ("copied into a constant first", lambda made: torch.zeros(2, 3).copy_(made).to(DEVICE)),
    ],
)
def test_it_is_followed_through_moves(name: str, move: Any) -> None:
    base = torch.ones(2, 3)
    found = watched(lambda: move(base.exp()))
    assert [one.made_by for one in found if one.computed] == ["aten::exp"], name


def test_an_operator_in_place_on_the_host_computes() -> None:
    (found,) = watched(lambda: torch.ones(2, 3).mul_(0.1).to(DEVICE))
    assert (found.computed, found.made_by) == (True, "aten::mul_")


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("integers", lambda: (torch.arange(4) * 2).to(DEVICE)),
        ("booleans", lambda: (torch.arange(4) > 2).to(DEVICE)),
        ("computed but not moved", lambda: torch.ones(3).exp()),
        ("computed and read", lambda: torch.ones(3).exp().tolist()),
        ("computed on the device", lambda: torch.ones(3, device=DEVICE).exp()),
        ("an integer made of floats", lambda: torch.ones(3).exp().long().to(DEVICE)),
    ],
)
def test_nothing_is_seen_of(name: str, work: Any) -> None:
    assert watched(work) == (), name


def test_constants_are_moved_but_not_computed() -> None:
    loaded = torch.linspace(0, 1, 5).cos()  # before the step
    found = watched(lambda: (loaded.to(DEVICE), torch.full((3,), 0.5).to(DEVICE), loaded.half().to(DEVICE)))
    assert [(one.computed, one.count) for one in found] == [(False, 3)]  # all in one line


def test_a_constant_written_over_what_was_computed_is_a_constant() -> None:
    def work() -> None:
        made = torch.ones(3).exp()
        made.copy_(torch.zeros(3))
        made.to(DEVICE)

    assert [one.computed for one in watched(work)] == [False]


def test_storages_whose_memory_is_used_again_are_not_confused() -> None:
    loaded = [torch.zeros(64) for _ in range(50)]

    def work() -> None:
        for one in loaded:
            torch.ones(64).exp()  # freed at once; its address goes to the next
            torch.empty(64).copy_(one).to(DEVICE)

    assert not any(one.computed for one in watched(work))


def test_equal_moves_of_one_place_are_counted() -> None:
    base = torch.ones(2)

    def work() -> None:
        for _ in range(3):
            base.exp().to(DEVICE)

    (found,) = watched(work)
    assert found.count == 3


def test_the_tapped_calls_that_are_given_it_are_named() -> None:
    book = CallBook()
    watch = Watch(book, DEVICE)
    book.begin(0, "prefill", 2)
    watch.begin(0, "prefill")
    book.after = "embed"
    with torch.inference_mode(), watch.watching():
        cos = torch.ones(1, 2, 3).cos().to(DEVICE)[0]
        for layer in (0, 1):
            query = torch.empty(2, 3, device=DEVICE)
            book.enter(Tapped("m:rope", "", ("attn.q_rope",), ("q", "cos")), layer, (query, cos), {})
            watch.given(["q", "cos"], (query, cos), {})
            torch.ones(2).sin().to(DEVICE)
            book.leave()
    outside, inside, second = watch.end()
    assert outside.feeds == (("layers.0.attn.q_rope", "cos"), ("layers.1.attn.q_rope", "cos"))
    assert (outside.after, outside.inside) == ("embed", ())
    assert (inside.made_by, inside.inside) == ("aten::sin", ("layers.0.attn.q_rope",))
    assert second.inside == ("layers.1.attn.q_rope",)


def test_nothing_is_looked_at_outside_a_step() -> None:
    watch = Watch(CallBook(), DEVICE)
    with torch.inference_mode(), watch.watching():
        torch.ones(3).exp().to(DEVICE)
    assert watch.end() == ()


def test_the_engines_own_operators_are_looked_into() -> None:
    library = torch.library.Library("vllm", "FRAGMENT")
    library.define("align_made_up(Tensor x) -> Tensor")
    library.impl("align_made_up", lambda x: x.exp().to(DEVICE).cpu() if x.is_meta else x.exp() * 2, "CPU")
    base = torch.ones(2)
    (found,) = watched(lambda: torch.ops.vllm.align_made_up(base).to(DEVICE))
    assert found.made_by in ("aten::mul", "vllm::align_made_up")
    assert found.computed


def test_results_do_not_change() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    want = torch.nn.functional.linear(x, x).softmax(-1)
    got: list[torch.Tensor] = []
    watched(lambda: got.append(torch.nn.functional.linear(x, x).softmax(-1)))
    assert torch.equal(got[0], want)
