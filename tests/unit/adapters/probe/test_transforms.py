"""Canonical form and back: every inverse rebuilds the native tensor, and parts are what a fusion by hand put there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapters.probe.taps import ENGINES, load_taps
from adapters.probe.transforms import TRANSFORMS, Dims
from align.checkpoints.table import Structure

dims = st.builds(Dims, st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 6))
rows = st.integers(1, 5)
INVERTIBLE = sorted(name for name, transform in TRANSFORMS.items() if transform.inverse is not None)
GROUPS = {
    "q": ("q", "k", "v"),
    "k": ("q", "k", "v"),
    "v": ("q", "k", "v"),
    "gate": ("gate", "up"),
    "up": ("gate", "up"),
}


def native(name: str, sizes: Dims, count: int) -> torch.Tensor:
    """A tensor as an engine has it, all elements different."""
    base = name.partition(".")[0]
    width = {
        "rows": 7,
        "heads": sizes.heads * sizes.head_dim,
        "heads_flat": sizes.heads * sizes.head_dim,
        "qkv": (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim,
        "gate_up": 2 * sizes.intermediate,
        "flat": 1,
    }[base.removesuffix("1")]
    shape = {"heads": (count, sizes.heads, sizes.head_dim), "flat": (count,)}.get(base.removesuffix("1"))
    shape = (count, width) if shape is None else shape
    tensor = torch.arange(float(count * width)).reshape(shape)
    return tensor[None] if base.endswith("1") else tensor


@pytest.mark.parametrize("name", INVERTIBLE)
@given(sizes=dims, count=rows)
def test_the_inverse_rebuilds_the_native_tensor(name: str, sizes: Dims, count: int) -> None:
    base, _, part = name.partition(".")
    parts = [f"{base}.{one}" for one in GROUPS[part]] if part else [name]
    given_to_taps = native(name, sizes, count)
    canonical = [TRANSFORMS[one].forward(given_to_taps, sizes) for one in parts]
    assert all(one.shape[0] == count for one in canonical)
    inverse = TRANSFORMS[name].inverse
    assert inverse is not None
    rebuilt = inverse(canonical, sizes)
    assert rebuilt.shape == given_to_taps.shape
    assert torch.equal(rebuilt, given_to_taps)


@given(sizes=dims, count=rows, batched=st.booleans())
def test_a_fusion_by_hand_is_taken_apart(sizes: Dims, count: int, batched: bool) -> None:
    q = torch.randn(count, sizes.heads, sizes.head_dim)
    k, v = torch.randn(2, count, sizes.kv_heads, sizes.head_dim)
    gate, up = torch.randn(2, count, sizes.intermediate)
    qkv = torch.stack([torch.cat([one[row].reshape(-1) for one in (q, k, v)]) for row in range(count)])
    gate_up = torch.stack([torch.cat([gate[row], up[row]]) for row in range(count)])
    one = "1" if batched else ""
    for name, whole, part in (
        ("q", qkv, q),
        ("k", qkv, k),
        ("v", qkv, v),
        ("gate", gate_up, gate),
        ("up", gate_up, up),
    ):
        base = "qkv" if name in "qkv" else "gate_up"
        found = TRANSFORMS[f"{base}{one}.{name}"].forward(whole[None] if batched else whole, sizes)
        assert torch.equal(found, part), name


@given(sizes=dims, count=st.integers(2, 5))
def test_heads_in_every_form_that_engines_use(sizes: Dims, count: int) -> None:
    canonical = torch.randn(count, sizes.heads, sizes.head_dim)
    forms = [canonical, canonical[None], canonical.flatten(1)]
    for form in forms:
        assert torch.equal(TRANSFORMS["heads"].forward(form, sizes), canonical)
    assert torch.equal(TRANSFORMS["heads_flat"].forward(canonical.flatten(1), sizes), canonical)


@pytest.mark.parametrize("name", ["qkv.q", "qkv.v", "gate_up.gate", "gate_up1.up"])
def test_another_width_is_refused(name: str) -> None:
    sizes = Dims(heads=4, kv_heads=2, head_dim=8, intermediate=6)
    wrong = torch.zeros(3, 12 + 3 if name.startswith("gate") else 64 + 8)
    with pytest.raises(RuntimeError):
        TRANSFORMS[name].forward(wrong, sizes)


def test_sizes_are_those_of_the_rank() -> None:
    structure = Structure((), 1, 64, 8, 2, 16, 96, 10, 1e-6, {}, 0.25, tp=4)
    assert Dims.of(structure, 3) == Dims(heads=2, kv_heads=1, head_dim=16, intermediate=24)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_transform_of_a_table_exists_and_says_its_inverse(engine: str) -> None:
    for tap in load_taps(engine):
        assert tap.inverse == TRANSFORMS[tap.transform].undo
        assert (TRANSFORMS[tap.transform].inverse is None) == tap.inverse.startswith("none")


def test_choices_of_experts_lose_their_order_and_weights_go_to_their_expert() -> None:
    dims = Dims(heads=4, kv_heads=2, head_dim=8, intermediate=16, experts=5)
    ids = torch.tensor([[3, 0], [1, 4], [2, 1]], dtype=torch.int32)
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.875, 0.125]], dtype=torch.bfloat16)
    assert TRANSFORMS["ids"].forward(ids, dims).tolist() == [[0, 3], [1, 4], [1, 2]]
    assert TRANSFORMS["ids"].forward(ids, dims).dtype == torch.int64
    fewer = TRANSFORMS["ids"].forward(ids, replace(dims, topk=3))
    assert fewer.tolist() == [[-1, 0, 3], [-1, 1, 4], [-1, 1, 2]], "a router that chooses too few is seen"
    found = TRANSFORMS["by_expert"].forward(ids, weights, dims)
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [[0.25, 0, 0, 0.75, 0], [0, 0.5, 0, 0, 0.5], [0, 0.125, 0.875, 0, 0]]
