"""A policy with a floor: narrower where it was calibrated, derived elsewhere, and it says which."""

from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest
import torch

from align.compare.floor import FloorRule
from align.compare.metrics import Metrics, Worst
from align.compare.noise import ulp
from align.compare.policy import TensorPolicy
from align.compare.tensors import compare_traces
from align.sentences import text_of
from align.trace.digest import channel_signs, digest_tokens
from align.trace.format import TOKEN_DIGEST, TOKEN_SQUARES
from tests.unit.align.compare import traces

DERIVED = TensorPolicy.derived("bfloat16", layers=4)
RULE = FloorRule("tiny", True, {"attn.q": {"whole": 1.5, "token": 3.0, "head": 9.0}, "embed": {"whole": 0.0}})
POLICY = replace(DERIVED, floor=RULE)


def test_it_narrows_what_it_knows() -> None:
    for layer in range(4):
        name = f"layers.{layer}.attn.q"
        unit, found, before = DERIVED.predicted(layer), POLICY.allowance(name), DERIVED.allowance(name)
        assert found.whole == pytest.approx(1.5 * unit) and found.token == pytest.approx(3.0 * unit)
        assert (found.channel, found.head) == (before.channel, before.head), "unknown, or wider than derived"
    assert POLICY.allowance("layers.1.attn.k") == DERIVED.allowance("layers.1.attn.k")
    assert POLICY.allowance("stranger") == DERIVED.allowance("stranger")


def test_never_below_one_rounding_of_each_side() -> None:
    assert POLICY.allowance("embed").whole == pytest.approx(0.4 * ulp(1.0, "bfloat16") * sqrt(2))


def test_wider_than_derived_only_where_allowed_and_never_than_the_cap() -> None:
    rule = replace(RULE, factor=4.0, why="calibrated on a simulated device", wider=True)
    found = replace(DERIVED, floor=rule).allowance("layers.0.attn.q")
    unit = DERIVED.predicted(0)
    assert found.whole == pytest.approx(6 * unit) and found.whole > DERIVED.allowance("layers.0.attn.q").whole
    assert found.head == pytest.approx(min(0.75, 36 * unit))
    assert replace(DERIVED, floor=replace(rule, wider=False)).allowance("layers.0.attn.q").whole == pytest.approx(
        4 * unit
    )
    assert replace(DERIVED, floor=replace(rule, factor=1e6)).allowance("layers.0.attn.q").whole == DERIVED.cap


def test_it_says_what_judges() -> None:
    assert POLICY.judged_by("layers.0.attn.q") == "calibrated floor tiny (simulated)"
    assert POLICY.judged_by("layers.0.attn.k") == "derived" == DERIVED.judged_by("layers.0.attn.q")
    assert replace(TensorPolicy.seed("bfloat16"), floor=RULE).judged_by("embed") == "the seeds' thresholds"
    none = Worst(0, 0.0)
    between = 2 * DERIVED.predicted(0)
    metrics = Metrics(False, 0.1, 0.5, between, 0.99, none, none, none, 9, 0)
    assert DERIVED.judge("layers.0.attn.q", metrics, 9)[0] == "within"
    verdict, why = POLICY.judge("layers.0.attn.q", metrics, 9)
    assert verdict == "beyond" and text_of(why).endswith(", by the calibrated floor tiny (simulated)")


def test_it_can_be_stored() -> None:
    assert TensorPolicy.from_dict(json.loads(json.dumps(POLICY.to_dict()))) == POLICY
    assert POLICY.without_floor() == DERIVED


def test_traces_are_judged_again_without_being_recorded_again(tmp_path: Path) -> None:
    sides = traces.write(tmp_path / "a", noise=0.01), traces.write(tmp_path / "b", noise=0.01, seed=1)
    wide = compare_traces(*sides, TensorPolicy.derived("bfloat16", 2))
    rule = FloorRule("strict", True, {"mlp.act": {"whole": 0.1}})
    strict = compare_traces(*sides, replace(TensorPolicy.derived("bfloat16", 2), floor=rule))
    pairs = list(zip(wide.checkpoints, strict.checkpoints, strict=True))
    changed = [
        (after.name, before.verdict, after.verdict) for before, after in pairs if before.verdict != after.verdict
    ]
    assert changed == [(f"layers.{layer}.mlp.act", "within", "beyond") for layer in range(2)]
    assert strict.to_dict()["policy"]["floor"]["name"] == "strict"
    assert all(before.metrics == after.metrics for before, after in pairs)


def test_estimates_are_judged_by_derived_bounds(tmp_path: Path) -> None:
    """Eight projections estimate a token's distance to about a third: a floor of values would accuse them."""

    def digests(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith("mlp.act")]:
            flat = tensors.pop(key).float()
            projected, squares = digest_tokens(flat[None], channel_signs("mlp.act", torch.arange(flat.shape[1]), 0))
            tensors[key + TOKEN_DIGEST], tensors[key + TOKEN_SQUARES] = projected[0], squares[0]

    sides = (
        traces.write(tmp_path / "a", noise=0.01, edit=digests),
        traces.write(tmp_path / "b", noise=0.01, seed=1, edit=digests),
    )
    rule = FloorRule("strict", True, {"mlp.act": {"whole": 0.1, "token": 0.1}})
    found = compare_traces(*sides, replace(TensorPolicy.derived("bfloat16", 2), floor=rule))
    act = [one for one in found.checkpoints if one.kind == "mlp.act"]
    assert [(one.estimated, one.verdict) for one in act] == [(True, "within")] * 2
