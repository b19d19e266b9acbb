"""A lean recording says of each operator what a whole one says, and of the rows the same on both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from adapters.base import RowSpan
from adapters.probe.lean import TOP_ROWS, RowChoice, TopRows, head_sums, heads_of, top_channels
from adapters.probe.residual import ResidualPass
from align.checkpoints.table import kinds
from align.compare.lean import worst_sums
from align.compare.residual import ResidualPolicy, ResidualVerdict, judge, largest_of
from align.trace.format import CHANNEL_RESIDUAL, TOKEN_RESIDUAL, WORST_RESIDUAL, StepEntry
from tests.unit.adapters.probe.dense_engine import DenseEngine, Recorded
from tests.unit.adapters.probe.llama_step import ROWS, feed, new, one_step, plain, tensors

Tensor = torch.Tensor
STEPS = (
    (RowSpan("a", 0, 40), RowSpan("b", 0, 1), RowSpan("c", 0, 20)),
    (RowSpan("c", 20, 1), RowSpan("a", 40, 1), RowSpan("b", 1, 1)),
)


def chosen(*steps: Sequence[RowSpan]) -> set[tuple[str, int]]:
    choice, found = RowChoice(), set()
    for rows in steps:
        names = [(span.request, span.start + at) for span in rows for at in range(span.count)]
        found |= {names[index] for index in choice.choose(rows)}
    return found


def test_rows_are_chosen_by_position_alone() -> None:
    decode = [[RowSpan("a", 40 + at, 1), RowSpan("b", 1 + at, 1)] for at in range(20)]
    together = chosen(STEPS[0][:2], *decode)
    apart = chosen([STEPS[0][1]], *([step[1]] for step in decode)) | chosen(
        [STEPS[0][0]], *([step[0]] for step in decode)
    )
    assert together == apart, "the batch does not matter"
    of_a = sorted(position for request, position in together if request == "a")
    assert of_a == [0, 3, 15, 39, 40, 43, 55], "a prompt's 1st, 4th, 16th and last row; the 1st, 4th, 16th generated"
    assert sorted(position for request, position in together if request == "b") == [0, 1, 4, 16]


def test_the_heads_of_chosen_rows() -> None:
    assert heads_of(STEPS[0], (0, 39, 40)) == (0, 1)
    assert heads_of(STEPS[0], (0, 3)) == ()


def test_the_worst_channels_by_brute_force() -> None:
    chance = torch.Generator().manual_seed(3)
    sums = torch.rand(3, 4, 16, generator=chance)
    sums[2] = (sums[2] - 0.5) * 1e-3
    sums[2, 1, 7] = 0.5
    sums[1, 2, 3] = 0.0  # nothing is known of it
    found = top_channels(sums)
    flat = sums.reshape(3, -1)
    gains = [(abs(float(flat[2, at] / flat[1, at])), at) for at in range(64) if float(flat[1, at]) > 0]
    assert max(gains)[1] in found[:, 0].int().tolist()
    assert 23 in found[:, 0].int().tolist()
    for channel, *rest in found.tolist():
        assert rest == flat[:, int(channel)].tolist()
    torch.testing.assert_close(head_sums(sums), sums.sum(2).T)
    assert top_channels(sums[:, 0, :2]).shape == (2, 4), "fewer channels than places"


def test_the_worst_rows_and_the_sums_of_all() -> None:
    chance = torch.Generator().manual_seed(4)
    steps = [torch.rand(2, 5, 3, generator=chance) for _ in range(3)]
    steps[1][0, 2] = torch.tensor([9.0, 0.5, 0.4])  # the largest norm
    steps[2][0, 4] = torch.tensor([0.1, 0.01, 5.0])  # the largest factor
    steps[2][1, 0] = torch.nan
    kept = TopRows(2)
    rows = torch.tensor([0, 3, 6, 7, 9])
    for number, step in enumerate(steps):
        kept.add(number, rows, step, torch.tensor([True, number != 1]))
    first, second = kept.layer(0), kept.layer(1)
    assert first[0].tolist()[:2] == [15.0, 0.0]
    torch.testing.assert_close(first[0, 2:], torch.cat([step[0] for step in steps]).sum(0))
    assert second[0, 0] == 9, "a layer that was not recomputed in a step, and a row that could not be"
    named = {(int(row[0]), int(row[1])): row[2:].tolist() for row in first[1:]}
    assert len(named) == TOP_ROWS
    assert named[1, 6] == steps[1][0, 2].tolist()
    assert named[2, 9] == steps[2][0, 4].tolist()
    assert not second[1:].isnan().any()


def test_few_rows_leave_places_empty() -> None:
    kept = TopRows(1)
    kept.add(0, torch.tensor([2]), torch.rand(1, 1, 3), torch.tensor([True]))
    kept.add(1, torch.tensor([], dtype=torch.int64), torch.rand(1, 0, 3), torch.tensor([True]))
    assert kept.layer(0)[1:].isnan().all(1).sum() == TOP_ROWS - 1


def both(change: Callable[[Recorded], None]) -> tuple[dict[str, ResidualVerdict], dict[str, ResidualVerdict]]:
    """The verdicts of a whole and of a lean recording of the same two steps, over both."""
    engine = DenseEngine()
    recorded = [engine.step(*rows, seed=seed) for seed, rows in enumerate(STEPS)]
    for step in recorded:
        change(step)
    found = []
    for lean in (False, True):
        residual = ResidualPass(engine.structure, engine.weights, engine.dtype, lean=lean)
        residual.begin(0)
        results = [
            residual.step(
                one.rows, "prefill", one.positions, one.token_ids, one.values, one.logits_rows, number=number
            ).tensors
            for number, one in enumerate(recorded)
        ]
        sums = residual.accumulated("prefill")
        entries = [StepEntry(number, "prefill", tuple(one.rows)) for number, one in enumerate(recorded)]
        policy = ResidualPolicy.for_dtype("bfloat16")
        verdicts = {}
        for name in (str(one) for one in engine.structure.names() if not one.kind.integer):
            largest = largest_of([result[name + WORST_RESIDUAL] for result in results])
            operator = engine.structure.operator(kinds()[name.rpartition("layers.")[2].split(".", 1)[-1]])
            if lean:
                worst = worst_sums(sums, name, engine.structure, entries)
                assert worst is not None
                verdicts[name] = judge(name, operator, policy, largest=largest, worst=worst[0], row_names=worst[1])
                assert not any(TOKEN_RESIDUAL in key or CHANNEL_RESIDUAL in key for key in (*sums, *results[0]))
                continue
            tokens = torch.cat([result[name + TOKEN_RESIDUAL] for result in results])
            names = [
                (span.request, span.start + at) for one in recorded for span in one.rows for at in range(span.count)
            ]
            if name == "logits":
                names = [(span.request, span.start + span.count - 1) for one in recorded for span in one.rows]
            verdicts[name] = judge(
                name, operator, policy, tokens=tokens, largest=largest, channels=sums[name + CHANNEL_RESIDUAL],
                channel_rows=len(tokens), row_names=names,
            )  # fmt: skip
        found.append(verdicts)
    return found[0], found[1]


def clean(step: Recorded) -> None:
    pass


def one_channel(step: Recorded) -> None:
    step.values["mlp.down"][1, :, 5] *= 1.05


def eight_channels(step: Recorded) -> None:
    step.values["mlp.down"][1, :, 8:16] *= 1.05


def one_row(step: Recorded) -> None:
    step.values["attn_norm"][2, 0] *= 1.03


def one_head(step: Recorded) -> None:
    step.values["attn.q"][0, :, 2] *= 1.02


@pytest.mark.parametrize("change", [clean, one_channel, eight_channels, one_row, one_head])
def test_a_lean_recording_gives_the_verdicts_of_a_whole_one(change: Callable[[Recorded], None]) -> None:
    whole, lean = both(change)
    assert whole.keys() == lean.keys()
    for name, one in whole.items():
        other = lean[name]
        assert (one.verdict, one.rows) == (other.verdict, other.rows), name
        if one.verdict == "beyond":
            assert (one.row_name, one.gain_channel) == (other.row_name, other.gain_channel), name
            assert (one.gain_token is None) is (other.gain_token is None)
        if one.gain_head is not None and other.gain_head is not None:
            assert one.gain_head.index == other.gain_head.index
            assert one.gain_head.value == pytest.approx(other.gain_head.value, rel=1e-3, abs=1e-6)
        assert one.rel_l2 == pytest.approx(other.rel_l2, rel=1e-3)
    wrong = {name for name, one in lean.items() if one.verdict == "beyond"}
    assert bool(wrong) is (change is not clean)


def test_a_recorder_keeps_little_and_says_what_it_saw(tmp_path: Path) -> None:
    recorder = new()
    recorder.begin(plain(tmp_path, "layers.1.attn.q", digest=True, lean=True), 1, 0, "prefill", ROWS)
    feed(recorder, tensors())
    recorder.end()
    trace, entry = one_step(tmp_path)
    # Of "a" the 1st and last row of three; of "b" (from position 5) the last of two.
    assert entry.digested == (0, 2, 4)
    digest = trace.tensor(0, 0, "layers.0.attn.k#tok")
    logits = trace.tensor(0, 0, "logits#tok")
    assert digest is not None and logits is not None
    assert (digest.shape[0], logits.shape[0]) == (3, 2)
    assert entry.noted == ()
    kept = {key for key in trace.keys(0, 0) if "#" not in key}
    assert "layers.1.attn.q" in kept and "layers.0.attn.q" not in kept
    assert trace.accumulated(0, "digest", "prefill") == {}
    recorder.begin(plain(tmp_path / "second", digest=True, lean=True), 2, 0, "decode", (RowSpan("z", 8, 5),))
    feed(recorder, tensors((RowSpan("z", 8, 5),)))
    recorder.end()
