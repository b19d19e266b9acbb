"""Every operation's relation: right is right, one changed element is wrong and says on which rank, less is unknown."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from align.collectives.record.types import CollectiveCall
from align.collectives.relations import Judged, Key, judge_call, together
from align.sentences import text_of
from tests.unit.align.collectives.calls import call

Tensor = torch.Tensor
KEY = Key((0, 1), "tp", 0)


def judge(*calls: CollectiveCall) -> Judged:
    return judge_call(KEY, {one.rank: one for one in calls})


def two(dtype: torch.dtype = torch.bfloat16, rows: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    if not dtype.is_floating_point:
        return [torch.randint(-9, 9, (rows, 6), generator=generator, dtype=dtype) for _ in range(2)]
    return [torch.randn(rows, 6, generator=generator).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64], ids=str)
def test_a_sum(dtype: torch.dtype) -> None:
    a, b = two(dtype)
    whole = a + b
    if dtype == torch.float64:  # its roundoff is not known here
        assert (
            judge(call(0, "all_reduce", [a], [whole]), call(1, "all_reduce", [b], [whole])).verdict == "not observable"
        )
        return
    found = judge(call(0, "all_reduce", [a], [whole]), call(1, "all_reduce", [b], [whole]))
    assert (found.verdict, found.ranks) == ("right", ())
    wrong = whole.clone()
    wrong[2, 3] += 1
    found = judge(call(0, "all_reduce", [a], [whole]), call(1, "all_reduce", [b], [wrong]))
    assert (found.verdict, found.ranks) == ("wrong", (1,))
    assert found.what is not None and "rank 1" in text_of(found.what) and text_of(found.what, "zh")


def test_results_that_differ_by_a_rounding() -> None:
    a, b = two()
    other = (a + b).clone()
    other.view(torch.int16)[0, 0] ^= 1
    near = judge(call(0, "all_reduce", [a], [a + b]), call(1, "all_reduce", [b], [other]))
    assert near.verdict == "wrong" and near.ranks == (1,)


@pytest.mark.parametrize("reduce", ["max", "min", "avg", "product"])
def test_other_reduces(reduce: str) -> None:
    a, b = two(torch.float32)
    right = {"max": torch.maximum(a, b), "min": torch.minimum(a, b), "avg": (a + b) / 2, "product": a * b}[reduce]
    calls = [call(rank, "all_reduce", [part], [right], reduce=reduce) for rank, part in enumerate((a, b))]
    assert judge(*calls).verdict == "right"
    calls = [call(rank, "all_reduce", [part], [a + b], reduce=reduce) for rank, part in enumerate((a, b))]
    assert judge(*calls).verdict == "wrong"
    calls = [call(rank, "all_reduce", [part], [right], reduce="xor") for rank, part in enumerate((a, b))]
    assert judge(*calls).verdict == "not observable"


@pytest.mark.parametrize("packed", [False, True], ids=["list", "one tensor"])
def test_all_gather_and_its_order(packed: bool) -> None:
    a, b = two()
    outs = [torch.cat([a, b])] if packed else [a, b]
    back = [torch.cat([b, a])] if packed else [b, a]
    assert judge(call(0, "all_gather", [a], outs), call(1, "all_gather", [b], outs)).verdict == "right"
    found = judge(call(0, "all_gather", [a], outs), call(1, "all_gather", [b], back))
    assert (found.verdict, found.ranks) == ("wrong", (1,))
    assert found.what is not None and "in the order of ranks 1, 0 instead of 0, 1" in text_of(found.what)


def test_gather_is_judged_at_the_root_alone() -> None:
    a, b = two()
    right = [call(0, "gather", [a], [a, b], root=0), call(1, "gather", [b], [], root=0)]
    assert judge(*right).verdict == "right"
    assert judge(call(0, "gather", [a], [a, a], root=0), right[1]).ranks == (0,)
    unknown = [call(0, "gather", [a], [a, b]), call(1, "gather", [b], [])]
    assert judge(*unknown).verdict == "not observable"


@pytest.mark.parametrize("packed", [False, True], ids=["list", "one tensor"])
def test_reduce_scatter(packed: bool) -> None:
    a, b = two()
    pieces = list((a + b).chunk(2))
    ins = [[part] if packed else list(part.chunk(2)) for part in (a, b)]
    calls = [call(rank, "reduce_scatter", ins[rank], [pieces[rank]]) for rank in (0, 1)]
    assert judge(*calls).verdict == "right"
    crossed = [call(rank, "reduce_scatter", ins[rank], [pieces[1 - rank]]) for rank in (0, 1)]
    assert judge(*crossed).ranks == (0, 1)


def test_all_to_all() -> None:
    a, b = two(rows=6)
    given = {0: [a[:1], a[1:]], 1: [b[:4], b[4:]]}
    got = {0: [a[:1], b[:4]], 1: [a[1:], b[4:]]}
    assert judge(*(call(rank, "all_to_all", given[rank], got[rank]) for rank in (0, 1))).verdict == "right"
    got[1] = [b[4:], a[1:]]
    assert judge(*(call(rank, "all_to_all", given[rank], got[rank]) for rank in (0, 1))).ranks == (1,)
    even = [
        call(0, "all_to_all", [a], [torch.cat([a[:3], b[:3]])]),
        call(1, "all_to_all", [b], [torch.cat([a[3:], b[3:]])]),
    ]
    assert judge(*even).verdict == "right"
    uneven = [call(0, "all_to_all", [a], [a[:5]]), call(1, "all_to_all", [b], [torch.cat([a, a[:1]])])]
    assert judge(*uneven).verdict == "not observable", "nobody recorded the counts"


def test_broadcast_and_barrier() -> None:
    a, b = two(torch.int64)
    assert judge(call(0, "broadcast", [a], [a], root=0), call(1, "broadcast", [b], [a], root=0)).verdict == "right"
    assert judge(call(0, "broadcast", [a], [a], root=0), call(1, "broadcast", [b], [b], root=0)).ranks == (1,)
    assert judge(call(0, "barrier"), call(1, "barrier")).verdict == "right"


def test_what_is_not_there_is_not_observable() -> None:
    a, b = two()
    whole = a + b
    right = call(0, "all_reduce", [a], [whole])
    assert judge(right).verdict == "not observable", "rank 1 left nothing"
    assert judge(right, call(1, "all_reduce", [b], [whole], ended=False)).verdict == "not observable"
    assert judge(right, call(1, "all_gather", [b], [whole])).verdict == "not observable"
    lacking = call(1, "all_reduce", [b], [whole], values=False, why="too large")
    found = judge(right, lacking)
    assert found.verdict == "not observable" and found.what is not None and "too large" in text_of(found.what)
    assert judge(right, call(1, "all_reduce", [b[:2]], [whole])).verdict == "not observable"
    assert judge(right, call(1, "all_reduce", [], [whole])).verdict == "not observable"


def test_checksums_alone_tell_unequal_results_and_no_sum() -> None:
    about: dict[str, Any] = {"values": False, "why": "budget"}
    same = [call(rank, "all_reduce", checksum_out="aa", **about) for rank in (0, 1)]
    assert judge(*same).verdict == "not observable"
    apart = [call(rank, "all_reduce", checksum_out=f"a{rank}", **about) for rank in (0, 1)]
    assert (judge(*apart).verdict, judge(*apart).ranks) == ("wrong", (1,))
    sent = [call(rank, "broadcast", root=0, checksum_in=f"i{rank}", checksum_out="i0", **about) for rank in (0, 1)]
    assert judge(*sent).verdict == "right"


def test_infinities_of_an_overflow_are_right_and_others_wrong() -> None:
    a = torch.full((2, 2), 3e38, dtype=torch.bfloat16)
    whole = a + a
    assert bool(whole.isinf().all())
    assert judge(call(0, "all_reduce", [a], [whole]), call(1, "all_reduce", [a], [whole])).verdict == "right"
    small = torch.ones(2, 2)
    nan = torch.full((2, 2), torch.nan)
    assert judge(call(0, "all_reduce", [small], [nan]), call(1, "all_reduce", [small], [nan])).verdict == "wrong"


def test_calls_are_put_together_by_group_and_place() -> None:
    records = {rank: [call(rank, "barrier", at=at) for at in range(3)] for rank in (1, 0)}
    found = together(records)
    assert list(found) == [Key((0, 1), "tp", at) for at in range(3)]
    assert all(list(calls) == [0, 1] for calls in found.values())
