"""Who is further: constructed errors of known size, and right sides of different numerics."""

from __future__ import annotations

import json
import math

import pytest
import torch

from align.golden.judge import GoldenPolicy, judge, ratio
from tests.unit.align.compare import rounded

POLICY = GoldenPolicy("bfloat16", 4)
NAME = "layers.1.mlp.down"


def noisy(truth: torch.Tensor, size: float, seed: int) -> torch.Tensor:
    return truth + size * truth.abs() * torch.randn(truth.shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def truth() -> torch.Tensor:
    return torch.randn(300, 64, generator=torch.Generator().manual_seed(0))


def test_equal_noise_is_alike(truth: torch.Tensor) -> None:
    found = judge(NAME, noisy(truth, 0.005, 1), noisy(truth, 0.005, 2), truth, POLICY)
    assert (found.verdict, found.why) == ("alike", "")
    assert found.factor == pytest.approx(1, abs=0.05) and found.rows == 300
    assert found.candidate is not None and found.candidate.rel_l2 == pytest.approx(0.005, rel=0.05)


@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_the_noisier_side_is_further(truth: torch.Tensor, side: str) -> None:
    sizes = (0.02, 0.004) if side == "candidate" else (0.004, 0.02)
    found = judge(NAME, noisy(truth, sizes[0], 1), noisy(truth, sizes[1], 2), truth, POLICY)
    assert found.verdict == f"{side} further"
    assert found.factor == pytest.approx(sizes[0] / sizes[1], rel=0.1)
    assert f"the {side} is 5" in found.why or f"the {side} is 4.9" in found.why


def test_one_channel(truth: torch.Tensor) -> None:
    bad = noisy(truth, 0.004, 1)
    bad[:, 9] *= 1.05
    found = judge(NAME, bad, noisy(truth, 0.004, 2), truth, POLICY)
    assert found.factor is not None and found.factor < POLICY.factor, "the whole does not show it"
    assert found.verdict == "candidate further"
    assert found.channels[0].channel == 9 and "channel 9 of the candidate" in found.why
    assert found.channels[0].candidate == pytest.approx(0.05, rel=0.1)
    mirrored = judge(NAME, noisy(truth, 0.004, 2), bad, truth, POLICY)
    assert mirrored.verdict == "reference further"
    assert mirrored.channels[0].factor == pytest.approx(1 / found.channels[0].factor)


def test_a_channel_of_few_rows_is_not_judged(truth: torch.Tensor) -> None:
    bad = noisy(truth, 0.004, 1)[:20]
    bad[:, 9] *= 1.05
    found = judge(NAME, bad, noisy(truth, 0.004, 2)[:20], truth[:20], POLICY)
    assert (found.verdict, found.channels) == ("alike", ())


def test_one_row_does_not_make_a_channel(truth: torch.Tensor) -> None:
    """A channel whose values stand in one row has one number, whose ratio is arbitrary."""
    truth[:, 5] *= 1e-3
    truth[17, 5] = 8.0
    left, right = noisy(truth, 0.004, 1), noisy(truth, 0.004, 2)
    left[17, 5], right[17, 5] = 8.05, 8.005
    assert judge(NAME, left, right, truth, POLICY).verdict == "alike"


def test_both_may_be_wrong_alike(truth: torch.Tensor) -> None:
    found = judge(NAME, noisy(truth, 0.3, 1), noisy(truth, 0.3, 2), truth, POLICY)
    assert found.verdict == "both further"
    one = judge(NAME, noisy(truth, 0.07, 1), noisy(truth, 0.045, 2), truth, POLICY)
    assert one.verdict == "candidate further" and "rounding reaches" in one.why


def test_a_copy_is_not_infinitely_nearer(truth: torch.Tensor) -> None:
    rounded_once = truth.bfloat16()
    found = judge(NAME, rounded_once, truth, truth, POLICY)
    assert found.verdict == "alike" and found.factor == pytest.approx(1, abs=0.2)
    assert judge(NAME, truth, truth, truth, POLICY).factor == 1.0


def test_what_is_not_finite_is_far(truth: torch.Tensor) -> None:
    broken = truth.clone()
    broken[3, 3] = float("nan")
    found = judge(NAME, broken, noisy(truth, 0.004, 2), truth, POLICY)
    assert found.verdict == "candidate further"
    assert "inf" in json.dumps(found.to_dict()["candidate"])
    assert ratio(float("nan"), 0.1, 0.01) == math.inf and ratio(0.1, math.inf, 0.01) == 0.0


def test_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="integers"):
        judge(NAME, torch.ones(3, 1), torch.ones(3, 1), torch.ones(3, 1, dtype=torch.int64), POLICY)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_right_numerics_are_alike_far(dtype: torch.dtype) -> None:
    """Native and fused kernels of the whole tiny model, either as the candidate."""
    ids = tuple((7 * at + at * at) % 1024 for at in range(150))
    golden = rounded.forward(ids, native=False, dtype=torch.float32)
    sides = [rounded.forward(ids, native, dtype) for native in (True, False)]
    policy = GoldenPolicy(str(dtype).removeprefix("torch."), 4)
    for name, truth in golden.items():
        for left, right in (sides, sides[::-1]):
            found = judge(name, left[name], right[name], truth, policy)
            assert found.verdict == "alike", (name, found.why)


def test_a_swapped_projection_departs_where_it_is() -> None:
    ids = tuple((7 * at + at * at) % 1024 for at in range(150))
    golden = rounded.forward(ids, native=False, dtype=torch.float32)
    wrong = rounded.forward(ids, True, torch.bfloat16, swapped=2)
    right = rounded.forward(ids, False, torch.bfloat16)
    verdicts = {name: judge(name, wrong[name], right[name], truth, POLICY).verdict for name, truth in golden.items()}
    first = next(name for name, verdict in verdicts.items() if verdict != "alike")
    assert (first, verdicts[first]) == ("layers.2.mlp.gate", "candidate further")
