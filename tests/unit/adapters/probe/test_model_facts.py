"""What is measured on modules and tensors, against numbers made another way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.probe import model_facts


def table(frequencies: np.ndarray, positions: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines in float64, rounded to ``dtype`` as an engine keeps them."""
    angles = np.arange(positions)[:, None] * frequencies[None]
    return torch.from_numpy(np.cos(angles)).to(dtype), torch.from_numpy(np.sin(angles)).to(dtype)


@given(
    base=st.floats(1e3, 5e6),
    half=st.sampled_from([8, 32, 64]),
    positions=st.sampled_from([2, 3, 64, 2048]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
@settings(max_examples=60, deadline=None)
def test_frequencies_come_back_within_what_the_table_resolves(
    base: float, half: int, positions: int, dtype: torch.dtype
) -> None:
    wanted = base ** (-np.arange(half) / half)
    found = model_facts.measured_frequencies(*table(wanted, positions, dtype))
    error = np.abs(np.array(found["inv_freq"]) - wanted) / wanted
    # float16 has no normal number below 2⁻¹⁴, where a relative bound says nothing.
    seen = wanted >= 2**-14 if dtype == torch.float16 else np.full(half, True)
    assert (error <= np.array(found["resolution"]))[seen].all()
    assert found["scale"] == 1.0


def test_more_positions_resolve_more() -> None:
    wanted = np.array([0.9, 0.3])
    short = model_facts.measured_frequencies(*table(wanted, 2, torch.bfloat16))
    long = model_facts.measured_frequencies(*table(wanted, 2048, torch.bfloat16))
    assert short["resolution"][0] == pytest.approx(2**-7, rel=0.01)
    assert long["resolution"][0] < 1e-5
    assert abs(long["inv_freq"][0] - 0.9) < 1e-5


def test_another_base_is_seen_in_a_bf16_table() -> None:
    exponents = -np.arange(64) / 64
    found = model_facts.measured_frequencies(*table(1.02e6**exponents, 2048, torch.bfloat16))
    excess = np.abs(np.array(found["inv_freq"]) / 1e6**exponents - 1) / np.array(found["resolution"])
    assert excess.max() > 5


class _Embedding(torch.nn.Embedding):
    """As engines call theirs."""


def test_a_head_without_a_module_is_the_embedding_if_there_is_no_other_table() -> None:
    model = torch.nn.Module()
    model.embed_tokens = _Embedding(6, 4)
    model.square = torch.nn.Linear(4, 6)  # of the same shape, and no table
    weight = model.embed_tokens.weight
    assert model_facts.tied_head(model, weight)
    model.word_head = _Embedding(6, 4)
    with pytest.raises(LookupError, match="no lm_head, and a _Embedding beside the embedding"):
        model_facts.tied_head(model, weight)
    model.lm_head = torch.nn.Linear(4, 6, bias=False)
    assert not model_facts.tied_head(model, weight)
    model.lm_head.weight = weight
    assert model_facts.tied_head(model, weight)


def test_the_length_of_the_rotated_vector() -> None:
    cos, sin = table(np.array([0.5, 0.01]), 16, torch.float32)
    assert model_facts.measured_frequencies(1.25 * cos, 1.25 * sin)["scale"] == pytest.approx(1.25)


@given(
    blocks=st.integers(1, 6),
    cells=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 2)), max_size=12),
)
@settings(max_examples=50, deadline=None)
def test_residue_is_what_counting_finds(blocks: int, cells: set[tuple[int, int, int]]) -> None:
    key, value = np.zeros((blocks, 4, 3), np.float32), np.zeros((blocks, 4, 3), np.float32)
    for block, slot, channel in cells:
        (key if channel else value)[block % blocks, slot, channel] = float("nan") if slot == 3 else -0.5
    expected = [np.count_nonzero(tensor) for tensor in (key, value)]
    dirty = sum(int(np.count_nonzero(tensor[block]) > 0) for tensor in (key, value) for block in range(blocks))
    found = model_facts.residue([(torch.from_numpy(key), torch.from_numpy(value))])
    assert found == {"elements": sum(expected), "blocks": dirty, "of_blocks": 2 * blocks}


def test_residue_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = torch.zeros(7, 2, 3)
    cache[1, 0, 0] = cache[6] = 1.0
    whole = model_facts.residue([cache])
    monkeypatch.setattr(model_facts, "_CHUNK", 13)
    assert model_facts.residue([cache]) == whole == {"elements": 7, "blocks": 2, "of_blocks": 7}


def test_negative_zero_is_nothing_left() -> None:
    assert model_facts.residue([-torch.zeros(2, 3)])["elements"] == 0


def test_caches_in_any_nesting() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    assert [t.item() for t in model_facts.flat_caches([one, None, (two, [one])])] == [0, 1, 0]


@pytest.mark.parametrize(
    ("name", "factor", "kind"),
    [
        ("DlinferRotaryEmbeddingImpl", 1.0, "default"),
        ("DlinferRotaryEmbeddingImpl", 4.0, "linear"),
        ("DlinferLlama3RotaryEmbeddingImpl", 1.0, "llama3"),
        ("DlinferYarnRotaryEmbeddingImpl", 4.0, "yarn"),
        ("DlinferLlamaDynamicNTKScalingRotaryEmbedding", 2.0, "dynamic"),
        ("AscendRotaryEmbedding", 1.0, "default"),
        ("AscendYaRNRotaryEmbedding", 4.0, "yarn"),
        ("AscendDeepseekScalingRotaryEmbedding", 40.0, "yarn"),
        ("LinearScalingRotaryEmbedding", 2.0, "linear"),
        ("Phi3LongRoPEScaledRotaryEmbedding", 1.0, "longrope"),
    ],
)
def test_types_of_rope_by_the_engines_own_classes(name: str, factor: float, kind: str) -> None:
    module = type(name, (torch.nn.Module,), {})()
    assert model_facts.rope_type(module, factor) == kind


def test_parameters_of_two_dtypes_are_both_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2).bfloat16(), torch.nn.Linear(2, 2).bfloat16())
    assert model_facts.parameter_dtypes(model) == "bfloat16"
    model[1].float()
    assert model_facts.parameter_dtypes(model) == ["bfloat16", "float32"]


def test_only_one_piece_of_memory_is_tied() -> None:
    weight = torch.ones(3, 2)
    assert model_facts.same_storage(weight, weight)
    assert not model_facts.same_storage(weight, weight.clone())
    assert not model_facts.same_storage(weight, weight[:2])


def test_dummies_are_counted_in_the_log_of_the_rank(tmp_path: Path) -> None:
    (tmp_path / "steps-rank1.jsonl").write_text(
        '{"event": "dummy", "generation": 0}\n{"event": "step", "rows": [["dummy", 0, 1, 0]]}\n{"event": "dummy"}\n'
    )
    assert model_facts.dummy_forwards(tmp_path, 1) == 2
    assert model_facts.dummy_forwards(tmp_path, 0) == 0


def test_modules_that_are_unlike_most() -> None:
    model = torch.nn.ModuleDict({f"norm{at}": torch.nn.Identity() for at in range(4)})
    values = dict(zip(model.values(), (1.0, 2.0, 1.0, 1.0), strict=True))
    assert model_facts.unlike(model, values.items()) == [["norm1", 2.0]]
    assert model_facts.unlike(model, ((one, 1.0) for one in model.values())) == []
    assert model_facts.unlike(model, ()) == []
