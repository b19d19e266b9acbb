"""Digests of a step: which names get them, that they are sums by canonical place, and that ranks and steps add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adapters.base import RowSpan
from adapters.probe.digests import DigestPass
from align.checkpoints.shards import Shard, shards
from align.checkpoints.table import Structure
from align.trace.digest import channel_signs, token_signs

WHOLE = Structure(
    tags=("all", "gqa", "dense"),
    layers=2,
    hidden=6,
    heads=4,
    kv_heads=2,
    head_dim=3,
    intermediate=8,
    vocab=10,
    eps=1e-6,
    rope={},
    scale=1.0,
)
ROWS = (RowSpan("a", 4, 2, 1), RowSpan("b", 0, 1))
SHAPES = {
    "embed": (1, 3, 6),
    "attn.q": (2, 3, 4, 3),
    "attn.k": (2, 3, 2, 3),
    "mlp.act": (2, 3, 8),
    "logits": (1, 2, 10),
}
SEED = 5


def values(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {kind: torch.randn(shape, generator=generator).to(torch.bfloat16) for kind, shape in SHAPES.items()}


def all_layers(found: dict[str, Tensor]) -> dict[str, set[int]]:
    return {kind: set(range(tensor.shape[0])) for kind, tensor in found.items()}


def made(held: dict[str, Shard] | None = None, seed: int = SEED) -> DigestPass:
    return DigestPass(held or {}, seed)


def test_digests_are_sums_over_channels_and_rows_by_hand() -> None:
    given = values()
    digests = made()
    found = digests.step(ROWS, "prefill", given, all_layers(given))
    sums = digests.accumulated("prefill")
    rows = token_signs(["a", "a", "b"], [4, 5, 0], [1, 1, 0], SEED).double()
    for kind, name, layer in (
        ("attn.q", "layers.1.attn.q", 1),
        ("embed", "embed", 0),
        ("mlp.act", "layers.0.mlp.act", 0),
    ):
        x = given[kind][layer].double()
        flat = x.flatten(1)
        signs = channel_signs(kind, torch.arange(flat.shape[1]), SEED).double()
        assert torch.allclose(found[f"{name}#tok"].double(), flat @ signs, atol=1e-5)
        assert torch.allclose(found[f"{name}#tok_sq"].double(), (flat**2).sum(-1), rtol=1e-5)
        expected = (rows.T @ flat).reshape(4, *x.shape[1:])
        assert sums[f"{name}#ch"].shape == expected.shape
        assert torch.allclose(sums[f"{name}#ch"].double(), expected, atol=1e-5)
        assert torch.allclose(sums[f"{name}#ch_sq"].double(), (x**2).sum(0), rtol=1e-5)
    assert {tensor.dtype for tensor in (*found.values(), *sums.values())} == {torch.float32}


def test_logits_have_one_row_per_request_and_no_channels() -> None:
    given = values()
    digests = made()
    found = digests.step(ROWS, "prefill", given, all_layers(given))
    signs = channel_signs("logits", torch.arange(10), SEED).double()
    assert torch.allclose(found["logits#tok"].double(), given["logits"][0].double() @ signs, atol=1e-5)
    assert "logits#ch" not in digests.accumulated("prefill")


def test_steps_of_a_phase_add_up_and_phases_do_not_mix() -> None:
    first, second, third = values(1), values(2), values(3)
    digests = made()
    digests.step(ROWS, "prefill", first, all_layers(first))
    early = digests.accumulated("prefill")["embed#ch_sq"].clone()
    digests.step(ROWS, "prefill", second, all_layers(second))
    digests.step(ROWS, "decode", third, all_layers(third))
    squares = [(given["embed"][0].double() ** 2).sum(0) for given in (first, second, third)]
    assert torch.allclose(early.double(), squares[0], rtol=1e-5)
    assert torch.allclose(digests.accumulated("prefill")["embed#ch_sq"].double(), squares[0] + squares[1], rtol=1e-5)
    assert torch.allclose(digests.accumulated("decode")["embed#ch_sq"].double(), squares[2], rtol=1e-5)
    assert digests.accumulated("mixed") == {}


def test_layers_that_were_not_seen_leave_nothing() -> None:
    given = values()
    given["attn.q"][0] = float("nan")  # whatever the buffer held
    digests = made()
    found = digests.step(ROWS, "decode", given, {"attn.q": {1}, "embed": set()})
    assert set(found) == {"layers.1.attn.q#tok", "layers.1.attn.q#tok_sq"}
    assert set(digests.accumulated("decode")) == {"layers.1.attn.q#ch", "layers.1.attn.q#ch_sq"}
    assert not any(tensor.isnan().any() for tensor in found.values())


def test_ids_have_no_digest() -> None:
    slots = {"attn.kv_start_indices": torch.zeros(2, 3, dtype=torch.int64)}
    digests = made()
    assert digests.step(ROWS, "decode", slots, {"attn.kv_start_indices": {0, 1}}) == {}
    assert digests.accumulated("decode") == {}


@pytest.mark.parametrize("tp", [2, 4])
def test_the_digests_of_all_ranks_add_up_to_that_of_the_whole(tp: int) -> None:
    given = values()
    given.pop("logits")
    whole = made()
    expected = whole.step(ROWS, "prefill", given, all_layers(given))
    structure = replace(WHOLE, tp=tp)
    total: dict[str, Tensor] = {}
    for rank in range(tp):
        held = shards(structure, rank)
        part = {
            kind: x if kind not in held else x.narrow(2, held[kind].start, held[kind].count)
            for kind, x in given.items()
        }
        digests = made(held)
        found = digests.step(ROWS, "prefill", part, all_layers(part))
        for key in ("layers.1.attn.q#tok", "layers.0.mlp.act#tok", "layers.0.mlp.act#tok_sq"):
            total[key] = total.get(key, torch.zeros(())) + found[key]
        assert torch.equal(found["embed#tok"], expected["embed#tok"]), "what every rank holds whole"
        channels = digests.accumulated("prefill")["layers.1.attn.k#ch"]
        own = held["attn.k"]
        assert torch.allclose(
            channels, whole.accumulated("prefill")["layers.1.attn.k#ch"][:, own.start : own.start + own.count]
        )
    for key, tensor in total.items():
        assert torch.allclose(tensor, expected[key], atol=1e-4), key


def test_rows_are_known_by_name_and_not_by_their_place() -> None:
    given = values()
    turned = {kind: x[:, [1, 0]] if kind == "logits" else x[:, [2, 0, 1]] for kind, x in given.items()}
    one, other = made(), made()
    found = one.step(ROWS, "prefill", given, all_layers(given))
    moved = other.step((ROWS[1], ROWS[0]), "prefill", turned, all_layers(turned))
    assert torch.allclose(found["embed#tok"][[2, 0, 1]], moved["embed#tok"])
    for key, tensor in one.accumulated("prefill").items():
        assert torch.allclose(tensor, other.accumulated("prefill")[key], atol=1e-5), key


def test_another_seed_projects_otherwise() -> None:
    given = values()
    one = made().step(ROWS, "prefill", given, all_layers(given))
    other = made(seed=6).step(ROWS, "prefill", given, all_layers(given))
    assert not torch.equal(one["embed#tok"], other["embed#tok"])
    assert torch.equal(one["embed#tok_sq"], other["embed#tok_sq"])
