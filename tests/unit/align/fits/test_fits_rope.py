"""Faults of rotary embedding, at short and long positions."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from align.checkpoints import recompute
from align.fits import FitCase, explain
from align.fits.rotation import Rotation
from align.fits.spectrum import best_positions, frequency_errors, phases
from tests.unit.align.checkpoints.test_recompute import config
from tests.unit.align.fits import synthetic as s

Tensor = torch.Tensor
SHORT, LONG = torch.arange(64), torch.arange(0, 2000)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def inverse(base: float = s.THETA) -> Tensor:
    return 1.0 / base ** (torch.arange(0, 64, 2).float() / 64)


def turned(positions: Tensor, frequencies: Tensor) -> Tensor:
    return positions.float()[:, None] * frequencies


def low(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def only(case: FitCase) -> tuple[str, dict[str, object]]:
    found = explain(case)
    assert len(found) == 1, [fit.text for fit in found]
    assert found[0].explains
    return found[0].kind, dict(found[0].parameters)


def test_clean_at_all_positions() -> None:
    assert explain(s.rope_case(positions=LONG[::16])) == ()
    assert explain(s.rope_case(positions=SHORT, parameters=LLAMA3)) == ()


@pytest.mark.parametrize("positions", [SHORT, LONG[:1000:5] + 1000], ids=["short", "long"])
def test_low_precision_of_angles(positions: Tensor) -> None:
    """F10: bf16(position) × bf16(frequency), rounded again."""
    angles = low(low(positions)[:, None] * low(inverse()))
    assert only(s.rope_case(angles, positions)) == (
        "rope_precision",
        {"dtype": "bfloat16", "of": "positions, frequencies and angles"},
    )


def test_low_precision_of_frequencies() -> None:
    kind, told = only(s.rope_case(turned(SHORT + 700, low(inverse())), SHORT + 700))
    assert (kind, told["of"]) == ("rope_precision", "frequencies")


def test_a_prompt_of_2000_tokens() -> None:
    kind, _ = only(s.rope_case(low(low(LONG)[:, None] * low(inverse())), LONG))
    assert kind == "rope_precision"


@pytest.mark.parametrize("base", [1e6, 12345.0])
def test_another_base(base: float) -> None:
    kind, told = only(s.rope_case(turned(SHORT, inverse(base)), SHORT))
    assert kind == "rope_base" and told["base"] == pytest.approx(base, rel=2e-3)


@pytest.mark.parametrize("preset", ["linear", "llama3", "yarn"])
def test_scaling_is_ignored(preset: str) -> None:
    """F11."""
    parameters = {
        "linear": {"rope_type": "linear", "factor": 8.0},
        "llama3": LLAMA3,
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    }[preset]
    kind, told = only(s.rope_case(turned(SHORT, inverse()), SHORT, parameters, factor=1.0))
    assert kind == "rope_scaling" and told["rope"]["rope_type"] == "default"  # type: ignore[index]


@pytest.mark.parametrize("factor", [4.0, 2.7])
def test_linear_scaling_that_the_model_does_not_have(factor: float) -> None:
    kind, told = only(s.rope_case(turned(SHORT, inverse() / factor), SHORT))
    assert kind == "rope_stretch" and told["factor"] == pytest.approx(1 / factor, rel=1e-3)


@pytest.mark.parametrize("offset", [1, -3, 40])
def test_positions_are_moved(offset: int) -> None:
    assert only(s.rope_case(turned(SHORT + 8 + offset, inverse()), SHORT + 8)) == (
        "rope_positions",
        {"offset": offset},
    )


@pytest.mark.parametrize("part", [0.25, -0.4, 0.02])
def test_positions_are_moved_by_a_part(part: float) -> None:
    """Position 0 is wrong as well, and no error grows: no other frequency or base does that."""
    kind, told = only(s.rope_case(turned(SHORT + part, inverse()), SHORT))
    assert kind == "rope_positions" and told["offset"] == pytest.approx(part, abs=2e-3)


def test_the_table_is_too_short() -> None:
    assert only(s.rope_case(turned(SHORT.clamp_max(48), inverse()), SHORT)) == ("rope_positions", {"end": 48})


def test_positions_of_other_rows() -> None:
    kind, told = only(s.rope_case(turned(SHORT.flip(0), inverse()), SHORT))
    assert kind == "rope_positions" and told["positions"][:2] == [[0, 63], [1, 62]]  # type: ignore[index]


def test_pairs_direction_and_none_at_all() -> None:
    assert only(s.rope_case(interleaved=True)) == ("rope_pairing", {"interleaved": True})
    assert only(s.rope_case(-turned(SHORT, inverse())))[0] == "rope_direction"
    assert only(s.rope_case(turned(SHORT * 0, inverse())))[0] == "rope_missing"


def test_frequencies_of_no_formula() -> None:
    odd = inverse() * (1 + torch.linspace(0.3, 0, 32).square())
    kind, told = only(s.rope_case(turned(SHORT, odd), SHORT))
    assert kind == "rope_frequencies"
    assert told["ratios"][:8] == pytest.approx((odd / inverse())[:8].tolist(), rel=1e-3)  # type: ignore[index]


@pytest.mark.parametrize("position", [50, 1000])
def test_a_single_row_of_decode(position: int) -> None:
    at = torch.tensor([position])
    assert only(s.rope_case(turned(at + 1, inverse()), at)) == ("rope_positions", {"offset": 1})
    assert only(s.rope_case(turned(at, inverse(1e6)), at))[0] == "rope_base"
    assert only(s.rope_case(low(low(at)[:, None] * low(inverse())), at))[0] == "rope_precision"


def test_the_rotation_is_that_of_transformers() -> None:
    described = config({"rope_type": "default"})
    module = LlamaRotaryEmbedding(described)
    positions = torch.tensor([0, 1, 17, 2000])
    x = s.normal(4, 3, 64, dtype=torch.float32)
    cos, sin = module(x, positions[None])
    wanted, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    rotation = Rotation.of({"rope": described.rope_parameters}, 64, positions)
    assert rotation is not None
    torch.testing.assert_close(rotation.apply(x, positions).float(), wanted[0].transpose(0, 1), rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(rotation.undo(rotation.apply(x, positions), positions), x.double())


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_rotation_is_the_recomputed_one(interleaved: bool) -> None:
    parameters = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    frequencies, factor = recompute.rope_frequencies(parameters, 64)
    x = s.normal(64, 2, 64)
    wanted = recompute.rope(x, SHORT, frequencies, factor, torch.float64, interleaved)
    rotation = Rotation.of({"rope": parameters, "interleaved": interleaved}, 64, SHORT)
    assert rotation is not None
    found = rotation.exact(x, SHORT, s.BF16)
    torch.testing.assert_close(found.value, wanted.value, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.magnitude, wanted.magnitude, rtol=1e-3, atol=1e-4)


def test_unknown_parameters_give_no_rotation() -> None:
    assert Rotation.of({}, 64, SHORT) is None
    assert Rotation.of({"rope": {"rope_type": "longrope", "rope_theta": 1e4}}, 64, SHORT) is None


def test_spectrum_finds_frequencies_and_positions() -> None:
    errors = torch.tensor([0.5, -0.2, 1e-3, 0.0], dtype=torch.float64)
    at = torch.arange(100, 180)
    ref = torch.polar(torch.ones(80, 3, 4, dtype=torch.float64), torch.rand(80, 3, 4, dtype=torch.float64) * 6)
    turn = torch.polar(torch.ones(80, 4, dtype=torch.float64), at.double()[:, None] * errors)
    seen = phases(ref * turn[:, None], ref)
    torch.testing.assert_close(frequency_errors(seen, at), errors, rtol=0, atol=1e-12)
    frequencies = inverse().double()
    moved = torch.polar(torch.ones(3, 32, dtype=torch.float64), torch.tensor([[5.0], [0], [-7]]) * frequencies)
    assert best_positions(moved, torch.tensor([10, 20, 30]), frequencies).tolist() == [15, 20, 23]
    assert math.isclose(float(moved.abs().max()), 1.0)
