"""Where to begin to read about experts' rows, from calls as both engines make them."""

from __future__ import annotations

from typing import Any

import pytest

from align.collectives.audit import Audited, with_records
from align.collectives.begin import place_of, ways
from align.collectives.explain import NEXT
from align.collectives.record.types import CollectiveCall, Place
from align.compare.parallel_code import with_parallel_code
from align.findings import Finding
from align.knowledge import knowledge

ROUTED = "layers.1.moe.routed"


def call(operation: str, step: int, *site: str, generation: int = 3) -> CollectiveCall:
    place = Place(generation, step, inside=("layers.1.moe.out", ROUTED))
    shape, function = ((4, 8),), f"torch.distributed.{operation}"
    return CollectiveCall(
        0, step, step, (0, 1), "g", "hccl", operation, function, "bfloat16", shape, shape, place,
        site=site,
    )  # fmt: skip


#: A prompt by all-to-all through a wrapper, the next token by the kernels, and behind both all rows to all ranks.
CALLS = [
    call("all_to_all", 0, "u.py:9 old_all_to_all", "t.py:0 of_an_earlier_run", generation=0),
    call("all_gather", 0, "t.py:1 counts"),
    call("all_to_all", 0, "u.py:9 async_all_to_all", "t.py:2 token_dispatch", "m.py:3 fused_experts"),
    call("all_to_all", 0, "u.py:9 async_all_to_all", "t.py:4 token_combine", "m.py:5 fused_experts"),
    call("all_gather", 0, "f.py:6 finalize"),
    call("dispatch", 1, "t.py:7 token_dispatch"),
    call("combine", 1, "t.py:8 token_combine"),
    call("all_gather", 1, "f.py:6 finalize"),
]
CODE = ["base.py:180 Base.all_reduce", "base.py:184 Base.all_gather", "npu.py:40 Npu.all_to_all"]


class Told:
    structure = None
    manifest: dict[str, Any] = {"observations": [{"name": "parallel_code", "value": CODE, "where": "x"}]}  # noqa: RUF012


def read(
    kind: str, step: int = 0, checkpoint: str = ROUTED, calls: Any = CALLS, groups: int = 1, **evidence: Any
) -> list[str]:
    finding = Finding("C", kind, "reference", checkpoint=checkpoint, layer=1, step=step, evidence=evidence)
    audits = {"reference": Audited(True, calls={0: calls})} if calls else {}
    found = with_records([finding], audits, {"reference": groups})
    traces: Any = {"candidate": Told(), "reference": Told()}
    (told,) = with_parallel_code(found, traces)
    assert set(told.evidence.get("read") or {}) <= {"reference"}
    return [one["place"] for one in (told.evidence.get("read") or {}).get("reference", [])]


@pytest.mark.parametrize(
    ("kind", "evidence", "places"),
    [
        ("expert_map", {}, ["t.py:2 token_dispatch", "t.py:7 token_dispatch"]),
        ("permuted_rows", {"like": 0.9}, ["t.py:2 token_dispatch", "t.py:7 token_dispatch"]),
        ("permuted_rows", {}, ["t.py:4 token_combine", "t.py:8 token_combine"]),
        ("combine_weights", {}, ["t.py:4 token_combine", "t.py:8 token_combine"]),
        ("missing_reduce", {}, ["t.py:4 token_combine", "t.py:8 token_combine"]),
        ("collective", {"left_out": [1]}, ["t.py:4 token_combine", "t.py:8 token_combine"]),
    ],
)
def test_it_begins_at_the_call_that_the_finding_is_about(
    kind: str, evidence: dict[str, Any], places: list[str]
) -> None:
    """In the phase of the finding, past wrappers that are named after the operation."""
    for step, place in enumerate(places):
        found = read(kind, step, **evidence)
        assert found[0] == place
        assert (CODE[0] in found) == (kind in ("missing_reduce", "collective"))  # behind it, a reduce may add up


def test_rows_on_their_way_to_the_experts_are_never_a_matter_of_a_reduce() -> None:
    assert read("expert_map") == ["t.py:2 token_dispatch", *CODE[1:]]
    assert read("expert_map", calls=None) == read("combine_weights", calls=None) == CODE[1:]


def test_weights_on_the_wrong_rank_are_no_matter_of_any_call() -> None:
    assert read("expert_map", parameter="model.layers.1.mlp.experts.4.gate_proj.weight") == []


def test_a_call_that_is_wrong_itself_is_where_it_begins() -> None:
    own = {"operation": "dispatch", "site": ["t.py:7 token_dispatch"]}
    assert read("collective", 1, collective=own)[0] == "t.py:7 token_dispatch"


def test_steps_of_two_groups_are_counted_together() -> None:
    """Step 1 is the prompt of the second group, step 3 its first decode."""
    assert read("expert_map", 1, groups=2)[0] == "t.py:2 token_dispatch"
    assert read("expert_map", 3, groups=2)[0] == "t.py:7 token_dispatch"


def test_a_step_without_such_a_call_is_told_by_another_one() -> None:
    assert read("expert_map", step=5)[0] == "t.py:7 token_dispatch"


def test_reduces_of_other_operators_begin_where_they_did() -> None:
    assert read("missing_reduce", checkpoint="layers.1.attn.o") == CODE


def test_a_wrapper_alone_is_better_than_nothing() -> None:
    assert place_of({"operation": "all_to_all", "site": ["u.py:9 async_all_to_all"]}) == "u.py:9 async_all_to_all"
    assert place_of({"operation": "dispatch"}) == ""


def test_every_kind_of_the_table_is_known_and_no_text_for_experts_speaks_of_strides_of_a_reduce() -> None:
    assert {key.split()[0] for key in ways()} <= knowledge().entries.keys()
    for key in ("collective", "missing_reduce", "permuted_rows"):
        assert NEXT[f"{key} experts"] != NEXT[key] and "{checkpoint}" in NEXT[f"{key} experts"]
