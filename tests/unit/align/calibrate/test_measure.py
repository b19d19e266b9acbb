"""Numbers of pairs of small traces against numbers taken from the tensors by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from align.calibrate.measure import Sample, measure_operators, measure_pair
from align.compare.policy import TensorPolicy
from align.trace.format import TOKEN_RESIDUAL, WORST_RESIDUAL
from align.trace.reader import Trace
from tests.unit.align.compare import traces

POLICY = TensorPolicy.derived("bfloat16", 2)


def rows_of(trace: Trace, name: str) -> dict[tuple[str, int], torch.Tensor]:
    found = {}
    for entry in trace.steps():
        if not entry.dummy:
            whole = trace.joined(entry.step, name)
            assert whole is not None
            places = [(span.request, span.start + at) for span in entry.rows for at in range(span.count)]
            found.update({place: whole[index].double() for index, place in enumerate(places)})
    return found


def relative(one: dict[tuple[str, int], torch.Tensor], other: dict[tuple[str, int], torch.Tensor]) -> float:
    difference = sum(float((one[key] - other[key]).square().sum()) for key in one)
    return float((difference / sum(float(value.square().sum()) for value in other.values())) ** 0.5)


def test_subsets_of_rows(tmp_path: Path) -> None:
    a, b = traces.write(tmp_path / "a", noise=0.01), traces.write(tmp_path / "b", noise=0.01, seed=1)
    found = [one for one in measure_pair("pair", a, b, POLICY) if one.where.startswith("layers.1.attn.q,")]
    whole = {one.where: one for one in found if one.metric == "whole"}
    left, right = rows_of(a, "layers.1.attn.q"), rows_of(b, "layers.1.attn.q")
    prefill = {("r0", at) for at in range(3)} | {("r1", at) for at in range(2)}
    subsets = {
        "all rows (7 rows)": set(left),
        "prefill (5 rows)": prefill,
        "decode (2 rows)": set(left) - prefill,
        "r0 (4 rows)": {key for key in left if key[0] == "r0"},
        "r1 (3 rows)": {key for key in left if key[0] == "r1"},
        "r0 prefill (3 rows)": {key for key in prefill if key[0] == "r0"},
        "r0 decode (1 rows)": {("r0", 3)},
        "r1 prefill (2 rows)": {key for key in prefill if key[0] == "r1"},
        "r1 decode (1 rows)": {("r1", 2)},
    }
    assert set(whole) == {f"layers.1.attn.q, {what}, pair" for what in subsets}
    for what, keys in subsets.items():
        one = whole[f"layers.1.attn.q, {what}, pair"]
        expected = relative({key: left[key] for key in keys}, {key: right[key] for key in keys})
        assert one.raw == pytest.approx(expected, rel=1e-5)
        assert one.value == pytest.approx(expected / POLICY.predicted(1), rel=1e-5)
        assert one.kind == "attn.q"
    assert {one.metric for one in found} == {"whole", "token", "head"}, "channels of so few rows are not judged"


def test_integers_and_unkept_values_are_left_out(tmp_path: Path) -> None:
    def forget(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        del tensors["layers.0.mlp.up"]

    pair = traces.write(tmp_path / "a", edit=forget), traces.write(tmp_path / "b")
    found = list(measure_pair("pair", *pair, POLICY))
    assert {one.value for one in found} == {0.0}
    names = {one.where.partition(",")[0] for one in found}
    assert "layers.1.mlp.up" in names and "layers.0.mlp.up" not in names
    assert not any("kv_start_indices" in name for name in names)


def test_other_requests_make_no_pair(tmp_path: Path) -> None:
    a, b = traces.write(tmp_path / "a"), traces.write(tmp_path / "b", steps=traces.STEPS[:1])
    assert {one.where.split(", ")[1] for one in measure_pair("x", a, b, POLICY)} >= {"all rows (5 rows)"}
    nothing = traces.write(tmp_path / "c", steps=traces.STEPS[1:])
    with pytest.raises(ValueError, match="no row is on both"):
        list(measure_pair("x", b, nothing, POLICY))


def test_operators_as_parts_of_their_bounds(tmp_path: Path) -> None:
    """A gain of 1 % in bfloat16: 2.56 roundings, of 4 that an RMSNorm may be off (operators.tsv)."""

    def edit(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        squares = torch.full((5 if phase == "prefill" else 2,), 16.0)
        sums = torch.stack([squares * 0.01**2, squares, squares * 0.01], 1)
        tensors["layers.1.mlp_norm" + TOKEN_RESIDUAL] = sums
        tensors["layers.1.mlp_norm" + WORST_RESIDUAL] = torch.tensor([2.56, 1.0, 2.0, 0.0])

    found: list[Sample] = list(measure_operators("one", traces.write(tmp_path, edit=edit)))
    element = [one for one in found if one.metric == "element"]
    assert len(element) == 2 and {one.kind for one in element} == {"mlp_norm"}
    assert all(one.raw == pytest.approx(2.56) and one.value == pytest.approx(2.56 / 4.08) for one in element)
    gains = [one.raw for one in found if one.metric == "token gain"]
    assert gains == pytest.approx([0.01, 0.01])
