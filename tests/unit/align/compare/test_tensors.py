"""Two traces, checkpoint by checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from adapters.base import RowSpan
from align.checkpoints.table import structure_of
from align.compare.locate import locate
from align.compare.policy import TensorPolicy
from align.compare.rows import RowKey
from align.compare.tensors import TensorComparison, compare_traces
from align.trace.digest import channel_signs, digest_tokens
from align.trace.format import POSITIONS, TOKEN_DIGEST, TOKEN_IDS, TOKEN_SQUARES
from align.trace.reader import Trace
from tests.unit.align.compare import traces

Tensors = dict[str, torch.Tensor]
NAMES = tuple(str(name) for name in structure_of(traces.CONFIG).names())
POLICY = TensorPolicy.derived("bfloat16", layers=2)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return traces.write(tmp_path_factory.mktemp("reference"))


def verdicts(comparison: TensorComparison) -> dict[str, str]:
    return {checkpoint.name: checkpoint.verdict for checkpoint in comparison.checkpoints}


def test_the_same_run_is_equal_whatever_its_batches(tmp_path: Path, reference: Trace) -> None:
    steps = (("prefill", (RowSpan("r1", 0, 2),)), ("mixed", (RowSpan("r0", 0, 3), RowSpan("r1", 2, 1))),
             ("decode", (RowSpan("r0", 3, 1),)))  # fmt: skip
    seen: list[str] = []
    found = compare_traces(
        traces.write(tmp_path, steps=steps), reference, POLICY, lambda done, total, name: seen.append(name)
    )
    assert tuple(verdicts(found)) == NAMES == tuple(seen)
    # The batch of logits differs: r0's second prefill row is no row of them on the other side.
    assert set(verdicts(found).values()) == {"equal"}
    assert all(checkpoint.rows == (4 if checkpoint.name == "logits" else 7) for checkpoint in found.checkpoints)
    for coverage in found.coverage.values():
        assert coverage.percent == 100.0 and not coverage.missing and not coverage.partial
    json.dumps(found.to_dict(), allow_nan=False)


def test_noise_is_within_and_drift_is_told(tmp_path: Path, reference: Trace) -> None:
    found = compare_traces(traces.write(tmp_path, noise=0.003), reference, POLICY)
    copies = ("embed", "key_states", "value_states", "indices")  # may not have any noise
    floats = {name: verdict for name, verdict in verdicts(found).items() if not name.endswith(copies)}
    assert set(floats.values()) == {"within"}
    assert [layer for layer, _, _ in found.drift] == [0, 1]
    assert all(0.001 < carried < predicted for _, carried, predicted in found.drift)
    act = found.get("layers.1.mlp.act")
    assert act is not None and act.inputs == (("layers.1.mlp.gate", "within"), ("layers.1.mlp.up", "within"))
    assert act.inputs_state == "within" and act.seed is False


def test_tensor_parallel_ranks_are_joined(tmp_path: Path, reference: Trace) -> None:
    found = compare_traces(traces.write(tmp_path, tp=2), reference, POLICY)
    same = [name for name in NAMES if verdicts(found)[name] == "equal"]
    assert same == list(NAMES)  # what exists under tensor parallelism alone is not on the reference
    assert verdicts(found)["layers.0.attn.o_partial"] == "not observable"
    assert {side: (one.expected, one.percent) for side, one in found.coverage.items()} == {
        "candidate": (len(NAMES) + 4, 100.0),
        "reference": (len(NAMES), 100.0),
        "paired": (len(NAMES), 100.0),  # what both layouts have
    }
    both = compare_traces(traces.write(tmp_path / "a", tp=2), traces.write(tmp_path / "b", tp=2), POLICY)
    assert (both.coverage["paired"].expected, both.coverage["paired"].percent) == (len(NAMES) + 4, 100.0)


def test_a_fault_of_decode_alone_is_found_in_its_row(tmp_path: Path, reference: Trace) -> None:
    def spoil(phase: str, step: int, tensors: Tensors) -> None:
        if phase == "decode":
            tensors["layers.1.mlp.down"][1] *= 2  # r0 position 3

    found = compare_traces(traces.write(tmp_path, edit=spoil), reference, POLICY).get("layers.1.mlp.down")
    assert found is not None and found.verdict == "beyond" and found.worst is not None
    assert (found.worst.key.request, found.worst.key.position, found.worst.phase) == ("r0", 3, "decode")
    assert found.worst.candidate.step == 1 and found.phases["prefill"].equal
    assert found.inputs_state == "equal"


def test_a_missing_tap_is_not_observable(tmp_path: Path, reference: Trace) -> None:
    def drop(phase: str, step: int, tensors: Tensors) -> None:
        del tensors["layers.0.attn.q_rope"]
        if phase == "decode":
            del tensors["layers.1.mid"]

    found = compare_traces(traces.write(tmp_path, edit=drop), reference, POLICY)
    checkpoint = found.get("layers.0.attn.q_rope")
    assert checkpoint is not None
    assert (checkpoint.verdict, checkpoint.why) == ("not observable", "not recorded by the candidate")
    half = found.get("layers.1.mid")
    assert half is not None and (half.verdict, half.rows, half.rows_missing) == ("equal", 5, {"candidate": 2})
    coverage = found.coverage["candidate"]
    assert (coverage.missing, coverage.partial) == (("layers.0.attn.q_rope",), ("layers.1.mid",))
    assert coverage.observed == len(NAMES) - 2 == found.coverage["paired"].observed
    assert found.coverage["paired"].why == (
        ("layers.0.attn.q_rope", "not recorded by the candidate"),
        ("layers.1.mid", "2 rows not recorded by the candidate"),
    )
    assert found.coverage["reference"].percent == 100.0
    out = found.get("layers.0.attn.out")
    assert out is not None and out.inputs_state == "unknown"


def test_a_bad_record_stops_nothing(tmp_path: Path, reference: Trace) -> None:
    def spoil(phase: str, step: int, tensors: Tensors) -> None:
        tensors["layers.0.mid"] = tensors["layers.0.mid"][:, :-1].contiguous()
        tensors["layers.0.mlp_norm"] = tensors["layers.0.mlp_norm"].long()

    found = compare_traces(traces.write(tmp_path, edit=spoil), reference, POLICY)
    wrong = {name: verdict for name, verdict in verdicts(found).items() if verdict != "equal"}
    assert wrong == {"layers.0.mid": "not comparable", "layers.0.mlp_norm": "not comparable"}
    mid = found.get("layers.0.mid")
    assert mid is not None and mid.why == "shapes differ: [7, 15] and [7, 16]"


def test_a_damaged_file_stops_nothing(tmp_path: Path, reference: Trace) -> None:
    traces.write(tmp_path)
    file = tmp_path / "rank0" / "step00001.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    found = compare_traces(Trace(tmp_path), reference, POLICY)
    assert set(verdicts(found).values()) == {"not comparable"}
    assert all(str(file) in checkpoint.why for checkpoint in found.checkpoints)
    assert found.coverage["candidate"].observed == 0


def test_replicas_that_differ_are_not_comparable(tmp_path: Path, reference: Trace) -> None:
    traces.write(tmp_path, tp=2)

    class Odd(Trace):
        def tensor(self, rank: int, step: int, key: str) -> torch.Tensor | None:
            found = super().tensor(rank, step, key)
            return found + 1 if found is not None and rank == 1 and key == "layers.0.mid" else found

    found = compare_traces(Odd(tmp_path), reference, POLICY).get("layers.0.mid")
    assert found is not None and found.verdict == "not comparable" and "ranks 0 and 1" in found.why


def test_wrong_slots_name_their_side(tmp_path: Path, reference: Trace) -> None:
    def spoil(phase: str, step: int, tensors: Tensors) -> None:
        if phase == "prefill":
            tensors["layers.1.attn.kv_start_indices"][4] = 0  # r1 position 1

    found = compare_traces(reference, traces.write(tmp_path, edit=spoil), POLICY).get("layers.1.attn.kv_start_indices")
    assert found is not None and found.verdict == "beyond"
    assert found.wrong_slots == {"reference": (("r1", 1, 0),)}
    assert found.worst is not None and found.worst.key == ("r1", 1, 0)


def digest(trace_seed: int) -> traces.Edit:
    def edit(phase: str, step: int, tensors: Tensors) -> None:
        for key in [key for key in tensors if tensors[key].is_floating_point()]:
            flat = tensors.pop(key).flatten(1)
            kind = key.split(".", 2)[2] if key.startswith("layers.") else key
            projected, squares = digest_tokens(flat[None], channel_signs(kind, torch.arange(flat.shape[1]), trace_seed))
            tensors[key + TOKEN_DIGEST], tensors[key + TOKEN_SQUARES] = projected[0], squares[0]

    return edit


def test_digests_give_estimates(tmp_path: Path) -> None:
    clean = traces.write(tmp_path / "clean", edit=digest(0))
    noisy = traces.write(tmp_path / "noisy", edit=digest(0), noise=0.003)

    def spoil(phase: str, step: int, tensors: Tensors) -> None:
        tensors["layers.1.mlp.gate"], tensors["layers.1.mlp.up"] = (
            tensors["layers.1.mlp.up"],
            tensors["layers.1.mlp.gate"],
        )
        digest(0)(phase, step, tensors)

    swapped = traces.write(tmp_path / "swapped", edit=spoil)
    within = compare_traces(noisy, clean, POLICY)
    assert all(one.estimated == ("indices" not in one.name) for one in within.checkpoints)
    assert {one.verdict for one in within.checkpoints if one.estimated} == {"within"}
    assert within.coverage["paired"].percent == 100.0
    found = compare_traces(swapped, clean, POLICY)
    assert [one.name for one in found.checkpoints if one.verdict == "beyond"] == [
        "layers.1.mlp.gate",
        "layers.1.mlp.up",
    ]
    seed = compare_traces(noisy, clean, TensorPolicy.seed("bfloat16"))
    assert {one.verdict for one in seed.checkpoints if one.estimated} == {"not observable"}


@pytest.mark.parametrize("tp", [1, 2])
def test_values_are_compared_with_the_digests_of_the_other_side(tmp_path: Path, tp: int) -> None:
    """A side recorded with a larger budget than the other."""
    values = traces.write(tmp_path / "values", tp=tp)
    digests = traces.write(tmp_path / "digests", edit=digest(0))
    found = compare_traces(values, digests, POLICY)
    floats = [one for one in found.checkpoints if one.estimated]
    assert len(floats) > 20
    assert {one.verdict for one in floats} == {"within"}
    distances = [None if one.metrics is None else one.metrics.rel_l2 for one in floats]
    assert all(distance is not None and distance < 1e-5 for distance in distances), "one and the same tensor"


def test_the_seed_policy_judges_alone(tmp_path: Path, reference: Trace) -> None:
    found = compare_traces(traces.write(tmp_path, noise=0.003), reference, TensorPolicy.seed("bfloat16"))
    assert {one.verdict for one in found.checkpoints if one.kind != "attn.kv_start_indices"} == {"beyond"}


def test_wrong_inputs_are_in_the_pairing(tmp_path: Path, reference: Trace) -> None:
    def feed(phase: str, step: int, tensors: Tensors) -> None:
        tensors[POSITIONS] += 1
        assert TOKEN_IDS in tensors

    found = compare_traces(traces.write(tmp_path, edit=feed), reference, POLICY)
    assert {one.key for one in found.pairing.inputs} == {POSITIONS}
    assert found.to_dict()["pairing"]["rows"] == 7


def test_what_is_not_finite_on_both_sides_is_a_finding(tmp_path: Path) -> None:
    def spoil(phase: str, step: int, tensors: Tensors) -> None:
        if phase == "decode":
            for name in ("layers.1.mlp.down", "final_in"):
                tensors[name][1, 5] = torch.nan  # r0 position 3

    one, other = traces.write(tmp_path / "a", edit=spoil), traces.write(tmp_path / "b", edit=spoil)
    found = compare_traces(one, other, POLICY)
    down = found.get("layers.1.mlp.down")
    assert down is not None and down.verdict == "equal" and down.nonfinite_row == RowKey("r0", 3, 0)
    assert down.why == "every element is equal; 1 elements are not finite, on both sides alike"
    (finding,) = locate(found, {}, tokens_differ=False)
    assert (finding.path, finding.kind, finding.side) == ("B", "nonfinite", None)
    assert (finding.checkpoint, finding.requests, finding.positions) == ("layers.1.mlp.down", ("r0",), (3,))
    assert finding.evidence["others"] == ["final_in"]
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_token_is_named_by_request_and_position(tmp_path: Path, reference: Trace) -> None:
    def spoil(phase: str, step: int, tensors: Tensors) -> None:
        if phase == "prefill":
            tensors["layers.1.attn.out"][4] *= 2  # r1 position 1

    found = compare_traces(traces.write(tmp_path, edit=spoil), reference, POLICY).get("layers.1.attn.out")
    assert found is not None and "relative L2 of r1 position 1 1 >" in found.why
