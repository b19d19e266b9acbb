"""Where in the model a rank is: by the innermost function with a checkpoint, in every forward and thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from adapters.probe.spots import Spots, hang_spots
from adapters.probe.taps import Tap
from align.checkpoints.table import structure_of
from tests.unit.adapters.probe.toy_engine import Layer, Rotary

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 2, "hidden_size": 4, "intermediate_size": 8, "vocab_size": 16,
}  # fmt: skip


class Root(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rotary = Rotary()
        self.layers = torch.nn.ModuleList([Layer(rotary), Layer(rotary)])


def tap(checkpoint: str, site: str, attribute: str = "forward") -> Tap:
    return Tap(checkpoint, site, attribute, "*:forward", "out", "rows")


TAPS = (
    tap("attn.q", "layers.{i}.self_attn.qkv_proj"),
    tap("attn.k", "layers.{i}.self_attn.qkv_proj"),
    tap("attn.q_rope", "layers.{i}.self_attn.rotary_emb"),
    tap("attn.o", "layers.{i}.self_attn.o_proj"),
    tap("attn.o_partial", "layers.{i}.self_attn.o_proj", "forward>somewhere:else"),
    tap("mlp.down", "layers.{i}.mlp.down_proj"),
    tap("token_ids", "", "forward"),
)


@pytest.fixture
def hung() -> tuple[Spots, Root, dict[int, tuple[str, ...]]]:
    """A model whose output projections say where they are."""
    spots, root = Spots(), Root()
    seen: dict[int, tuple[str, ...]] = {}
    for index, layer in enumerate(root.layers):
        original = layer.self_attn.o_proj.forward  # type: ignore[union-attr]

        def forward(x: Any, index: int = index, original: Any = original) -> Any:
            seen[index] = spots.inside
            return original(x)

        layer.self_attn.o_proj.forward = forward  # type: ignore[union-attr]
    hang_spots(spots, TAPS, root, structure_of(CONFIG, 1))
    return spots, root, seen


def test_the_function_that_runs(hung: tuple[Spots, Root, dict[int, tuple[str, ...]]]) -> None:
    spots, root, seen = hung
    spots.begin()
    assert (spots.inside, spots.after) == ((), ())
    for layer in root.layers:
        layer(torch.ones(3, 4), None)
    assert seen == {0: ("layers.0.attn.o",), 1: ("layers.1.attn.o",)}
    assert (spots.inside, spots.after) == ((), ("layers.1.attn.o",))
    root.layers[0].self_attn.qkv_proj(torch.ones(3, 4))  # type: ignore[operator, union-attr]
    assert spots.after == ("layers.0.attn.q", "layers.0.attn.k"), "an object of all layers, the rotary, tells nothing"
    spots.begin()
    assert not spots.after


def test_another_thread_is_somewhere_else(hung: tuple[Spots, Root, dict[int, tuple[str, ...]]]) -> None:
    spots, _, _ = hung
    found: list[tuple[str, ...]] = []
    spots.enter(("embed",))
    thread = threading.Thread(target=lambda: found.append(spots.inside))
    thread.start()
    thread.join()
    assert found == [()]
    assert spots.inside == ("embed",)


def test_a_function_that_fails_is_left(hung: tuple[Spots, Root, dict[int, tuple[str, ...]]]) -> None:
    spots, root, _ = hung
    with pytest.raises(RuntimeError):
        root.layers[0].self_attn.qkv_proj(torch.ones(3, 5))  # type: ignore[operator, union-attr]
    assert spots.inside == ()
