"""From traces of two ranks to path C: side, kind, place, rank and numbers, and nothing where nothing is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from align.collectives.apart import copies_of, copies_unseen, ranks_apart
from align.collectives.replicas import judge_replicas, row_order
from align.compare.locate import locate
from align.findings import Finding
from align.run.judge import judge_tensors
from align.sentences import text_of
from align.trace.format import TOKEN_IDS
from align.trace.reader import Trace
from tests.unit.align.collectives.two_ranks import Change, consistent, write
from tests.unit.align.compare import traces

Tensor = torch.Tensor


def judged(tmp_path: Path, candidate: Change | None = None, reference: Change | None = None) -> list[Finding]:
    left, right = (write(tmp_path / str(at), change) for at, change in enumerate((candidate, reference)))
    _, findings = judge_tensors(left, right, "derived", {})
    for finding in findings:
        assert "?" not in finding.summary
        assert text_of(finding.evidence["sentence"], "zh")
        for one in finding.evidence.get("hypotheses", ()):
            assert text_of(one["sentence"], "zh") and one["what"]
    return list(findings)


def told(finding: Finding) -> tuple[Any, ...]:
    return finding.path, finding.kind, finding.side, finding.checkpoint, finding.ranks


def states(finding: Finding) -> dict[str, str]:
    return {one["name"]: one["state"] for one in finding.evidence["hypotheses"]}


WHOLE, PART = "layers.1.attn.o", "layers.1.attn.o_partial"


def test_right_ranks_are_silent(tmp_path: Path) -> None:
    assert judged(tmp_path) == []
    replicas = judge_replicas(Trace(tmp_path / "0"))
    assert not replicas.unequal and not replicas.unseen
    assert replicas.equal["layers.0.attn_norm"] == len(traces.STEPS)
    assert "layers.0.attn.q" not in replicas.equal, "ranks hold different heads"


def test_a_missing_reduce_says_that_the_sum_matches_the_other_side(tmp_path: Path) -> None:
    def skip(rank: int, step: int, tensors: dict[str, Tensor]) -> None:
        tensors[WHOLE] = tensors[PART].clone()

    (first, *_) = judged(tmp_path, skip)
    assert told(first) == ("C", "missing_reduce", "candidate", WHOLE, (0, 1))
    assert first.evidence["residual_of_sum"] < 0.01 < 0.3 < first.evidence["residual_of_rank"]
    assert first.evidence["steps_fit"] == first.evidence["steps_tried"] == 2
    assert states(first)["doubled_reduce"] == "refuted"
    assert first.evidence["phases"]["onset"] == "prefill"
    assert "reduce" in first.next


def test_a_doubled_reduce_of_the_reference(tmp_path: Path) -> None:
    def double(rank: int, step: int, tensors: dict[str, Tensor]) -> None:
        tensors["layers.0.mlp.down"] *= 2

    (first, *_) = judged(tmp_path, None, double)
    assert told(first) == ("C", "doubled_reduce", "reference", "layers.0.mlp.down", (0, 1))
    assert abs(first.evidence["ratio"] - 2) < 0.01 and first.evidence["size"] == 2


def test_a_reduce_that_is_missing_in_decode_alone_begins_there(tmp_path: Path) -> None:
    def skip(rank: int, step: int, tensors: dict[str, Tensor]) -> None:
        if step == 1:
            tensors[WHOLE] = tensors[PART].clone()

    (first, *_) = judged(tmp_path, skip)
    assert (first.kind, first.phase) == ("missing_reduce", "decode")
    assert first.evidence["phases"]["states"]["prefill"] in ("within", "equal")
    assert first.evidence["phases"]["onset"] == "decode 1"


def test_a_stale_buffer_names_rank_and_content(tmp_path: Path) -> None:
    def stale(rank: int, step: int, tensors: dict[str, Tensor]) -> None:
        if rank == 1:
            tensors[WHOLE] = tensors["layers.0.mlp.down"].clone()

    (first, *_) = judged(tmp_path, stale)
    assert told(first) == ("C", "stale_buffer", "candidate", WHOLE, (1,))
    assert first.evidence["holds"] == {"1": "layers.0.mlp.down (step 0)"}


def test_a_factor_of_one_rank_stays_a_collective_and_names_the_rank(tmp_path: Path) -> None:
    def scale(rank: int, step: int, tensors: dict[str, Tensor]) -> None:
        parts = [one[PART].float() for one in consistent(tuple(traces.STEPS[step][1]))]
        tensors[WHOLE] = (parts[0] + 1.5 * parts[1]).bfloat16()

    (first, *_) = judged(tmp_path, scale)
    assert told(first) == ("C", "collective", "candidate", WHOLE, (1,))
    assert first.evidence["hypothesis"] == "collective" and "× the part of rank 1" in first.summary
    assert [round(one, 2) for one in first.evidence["factors"]["0"]] == [1.0, 1.5]


def test_a_wrong_result_that_nothing_explains_lists_what_was_tried(tmp_path: Path) -> None:
    def spoil(rank: int, step: int, tensors: dict[str, Tensor]) -> None:
        tensors[WHOLE][0, 3] += 1

    (first, *_) = judged(tmp_path, spoil)
    assert told(first)[:4] == ("C", "collective", "candidate", WHOLE)
    assert set(states(first).values()) == {"refuted"} and "hypothesis" not in first.evidence


def test_an_embedding_without_its_reduce(tmp_path: Path) -> None:
    """Each rank has zeros where the other has the row."""

    def half(rank: int, step: int, tensors: dict[str, Tensor]) -> None:
        mine = tensors[TOKEN_IDS] % 2 == rank
        tensors["embed"] = tensors["embed"] * mine[:, None].to(torch.bfloat16)

    (first, *others) = judged(tmp_path, None, half)
    assert told(first) == ("C", "missing_reduce", "reference", "embed", (0, 1))
    assert first.evidence["residual_of_sum"] == 0.0
    assert all(one.checkpoint != "embed" for one in others)


def test_one_rank_with_other_copies_is_an_origin_where_its_inputs_are_alike(tmp_path: Path) -> None:
    def spoil(rank: int, step: int, tensors: dict[str, Tensor]) -> None:
        if rank == 1 and step == 1:
            for name in ("layers.1.mlp_norm", "layers.1.mid"):
                tensors[name][1, 2] += 1

    trace = write(tmp_path, spoil)
    replicas = copies_of({"candidate": trace})
    assert list(replicas["candidate"].unequal) == ["layers.1.mid", "layers.1.mlp_norm"]
    (apart,) = replicas["candidate"].unequal["layers.1.mid"]
    assert (apart.step, apart.rank, apart.rows, apart.row_name) == (1, 1, (1,), ("r0", 3))


def test_the_batch_of_a_rank_in_another_order(tmp_path: Path) -> None:
    def swap(rank: int, step: int, tensors: dict[str, Tensor]) -> None:
        if rank == 1 and step == 1:
            tensors[TOKEN_IDS] = tensors[TOKEN_IDS].flip(0)

    (first,) = judged(tmp_path, swap)
    assert told(first) == ("C", "batch_order", "candidate", "embed", (1,))
    assert (first.phase, first.step, first.evidence["order"]) == ("decode", 1, [1, 0])


def test_logits_whose_parts_are_joined_in_the_wrong_order(tmp_path: Path) -> None:
    def swap(rank: int, step: int, tensors: dict[str, Tensor]) -> None:
        tensors["logits"] = torch.cat(tensors["logits"].chunk(2, -1)[::-1], -1)

    (first,) = judged(tmp_path, swap)
    assert told(first)[:2] == ("C", "gather_order") and first.checkpoint == "logits"
    assert first.evidence["blocks"] == [{"block": 0, "is": 1}, {"block": 1, "is": 0}]


def test_a_tensor_that_differs_on_every_rank_alike_stays_path_b(tmp_path: Path) -> None:
    def scale(rank: int, step: int, tensors: dict[str, Tensor]) -> None:
        tensors["layers.1.attn_norm"] = tensors["layers.1.attn_norm"] * 1.2

    (first, *_) = judged(tmp_path, scale)
    assert (first.path, first.kind, first.checkpoint) == ("B", "unexplained", "layers.1.attn_norm")
    assert "fits" not in states(first).values()


def record(kind: str, rank: int, layer: int, **more: Any) -> dict[str, Any]:
    part = kind.rpartition(".")[2]
    about = {"parameter": f"model.layers.{layer}.self_attn.{part}_proj.weight", "live": "qkv", "kind": kind}
    numbers = {"status": "differs", "rows": [0], "rows_total": 8, "max_abs": 1.0, "why": ""}
    return {**about, **numbers, "layer": layer, "rank": rank, "holds": "", "heads": (), "heads_due": (), **more}


def test_weights_of_another_rank_are_a_shard_and_other_heads_a_map() -> None:
    unsplit = [
        record(kind, 1, layer, holds="the share of rank 0")
        for layer in (0, 1)
        for kind in ("attn.q", "attn.k", "attn.v")
    ]
    (found,) = locate(None, {"candidate": unsplit}, tokens_differ=False)
    assert told(found) == ("C", "shard", "candidate", "layers.0.attn.q", (1,))
    assert found.evidence["layers"] == [0, 1] and "rank 1 holds the k of rank 0" in found.summary

    crossed = [
        record(kind, rank, 0, holds=f"the share of rank {3 - rank}", heads=(2 - rank,), heads_due=(rank - 1,))
        for rank in (1, 2)
        for kind in ("attn.k", "attn.v")
    ]
    (found,) = locate(None, {"reference": crossed}, tokens_differ=False)
    assert told(found) == ("C", "head_map", "reference", "layers.0.attn.k", (1, 2))
    assert "rank 1 holds k heads 1 where 0 are due" in found.summary
    assert found.evidence["heads"][0] == {"rank": 1, "kind": "attn.k", "held": [1], "due": [0]}


def test_what_every_expert_of_a_rank_says_is_said_once() -> None:
    experts = [
        {
            **record("moe.routed", 1, 0, holds="the share of rank 0"),
            "parameter": f"model.layers.0.mlp.experts.{one}.{name}",
        }
        for one in range(8)
        for name in ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    ]
    (found,) = locate(None, {"candidate": experts}, tokens_differ=False)
    assert found.evidence["what"].count("rank 1 holds the routed of rank 0") == 1
    assert found.evidence["others_total"] == 23


def test_a_weight_that_is_only_damaged_stays_path_b() -> None:
    (found,) = locate(None, {"candidate": [record("attn.q", 1, 0, holds="zeros")]}, tokens_differ=False)
    assert (found.path, found.kind) == ("B", "weights")


def test_an_origin_behind_another_fault_of_the_side_is_its_receiver() -> None:
    apart = Finding("C", "unequal_ranks", side="candidate", checkpoint="layers.1.mid", layer=1, evidence={"what": "x"})
    weight = record("attn.q", 1, 0, holds="zeros")
    assert [one.kind for one in locate(None, {"candidate": [weight]}, False, (), [apart])] == ["weights"]


def test_the_order_of_rows_is_exact() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
    assert row_order(rows[[1, 0, 2]], rows) == (1, 0, 2)
    assert row_order(rows, rows) == (0, 1, 2)
    assert row_order(rows + 1, rows) == ()


def test_ranks_whose_records_are_damaged_are_unseen(tmp_path: Path) -> None:
    write(tmp_path)
    next((tmp_path / "rank1").glob("step00000*")).write_bytes(b"cut")
    trace = Trace(tmp_path)
    replicas = judge_replicas(trace)
    assert "cannot be read" in replicas.unseen["embed"] and not replicas.unequal
    assert replicas.equal["embed"] == 1, "the other step is judged"
    (note,) = copies_unseen({"candidate": replicas})
    assert note.startswith("the candidate's copies on its ranks are not observable at ") and "cannot be read" in note
    assert ranks_apart({"candidate": replicas}, None, {"candidate": trace}) == []  # type: ignore[arg-type]
