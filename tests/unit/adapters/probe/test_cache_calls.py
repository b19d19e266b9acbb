"""The cache's operators are seen with what they were given, whichever layout they take it in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from adapters.probe.cache_calls import CacheCalls, Read, Write, cache_operators, read_of, write_of
from envs.home import REPOSITORY

T = torch.tensor
FIA = "npu::npu_fused_infer_attention_score"


class Heard:
    """Notes what it is told; raises where it is asked to."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.told = broken, []  # type: tuple[bool, list[Any]]

    def before_write(self, call: Write) -> None:
        if self.broken:
            raise ValueError("no")
        self.told.append(("write", call.slots.tolist(), float(call.key_cache.sum())))

    def after_write(self, call: Write) -> None:
        self.told.append(("written", float(call.key_cache.sum())))

    def before_read(self, call: Read) -> None:
        self.told.append(("read", call.kv_lens.tolist()))

    def fail(self, what: str, error: Exception) -> None:
        self.told.append(("fail", what, str(error)))


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """Operators of the names that the table knows, which do as little as they may."""
    made = torch.library.Library("atb", "FRAGMENT")
    made.define("_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
                "Tensor slot_indices) -> ()")  # fmt: skip

    def write(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_indices: Any) -> None:
        key_cache.view(-1, *key_cache.shape[2:])[slot_indices] = key
        value_cache.view(-1, *value_cache.shape[2:])[slot_indices] = value

    made.impl("_npu_reshape_and_cache", write, "CPU")
    yield made
    made._destroy()


@pytest.mark.parametrize("broken", [False, True])
def test_a_write_is_heard_before_and_after(library: torch.library.Library, broken: bool) -> None:
    heard = Heard(broken)
    cache, values = torch.zeros(2, 2, 1, 1), torch.zeros(2, 2, 1, 1)
    rows = torch.ones(2, 1, 1)
    with CacheCalls(heard):
        torch.ops.atb._npu_reshape_and_cache(rows, rows, cache, value_cache=values, slot_indices=T([3, 0]))
    assert cache.flatten().tolist() == [1.0, 0.0, 0.0, 1.0], "the engine goes on, whatever its observer does"
    if broken:
        assert heard.told[0] == ("fail", "atb::_npu_reshape_and_cache", "no")
    else:
        assert heard.told == [("write", [3, 0], 0.0), ("written", 2.0)]


def test_the_table_agrees_with_the_published_signatures() -> None:
    """The signature tables of the simulation are torch_npu's own."""
    folder = REPOSITORY / "envs" / "simnpu" / "path"
    texts = [path.read_text() for path in folder.rglob("*.txt")]
    found = 0
    for name, one in cache_operators().items():
        short = name.partition("::")[2]
        lines = [line for text in texts for line in text.splitlines() if line.startswith(f"{short}(")]
        assert lines, name
        named = (one.key, one.value, one.key_cache, one.value_cache, one.index, one.q_lengths, one.kv_lengths)
        for argument in filter(None, named):
            assert all(f" {argument}" in line for line in lines), (name, argument)
            found += 1
    assert found > 30


def values(**changes: Any) -> dict[str, Any]:
    given = {
        "query": torch.zeros(5, 1, 8), "key": torch.zeros(4, 2, 8), "value": torch.zeros(4, 2, 8),
        "block_table": T([[1, 0], [2, 3]]), "actual_seq_lengths": [2, 5], "actual_seq_lengths_kv": [4, 3],
        "input_layout": "TND",
    }  # fmt: skip
    return {**given, **changes}


def lists(read: Read) -> tuple[Any, ...]:
    starts = None if read.q_starts is None else read.q_starts.tolist()
    return read.q_lens.tolist(), read.kv_lens.tolist(), starts, read.tables is not None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # Packed sequences over a paged cache: ends of queries, lengths of keys.
        (values(), ([2, 3], [4, 3], [0, 2, 5], True)),
        # Packed sequences without a cache: ends of both.
        (values(block_table=None, actual_seq_lengths_kv=[2, 5]), ([2, 3], [2, 3], [0, 2, 5], False)),
        # A batch: lengths of both, and one query each where none is said.
        (values(input_layout="BSH", actual_seq_lengths=None, query=torch.zeros(2, 1, 8)), ([1, 1], [4, 3], None, True)),
        (values(input_layout="BSND", actual_seq_lengths=[2, 3]), ([2, 3], [4, 3], None, True)),
        (values(input_layout="BNSD", actual_seq_lengths=None, query=torch.zeros(2, 8, 3, 4)),
         ([3, 3], [4, 3], None, True)),
        (values(actual_seq_lengths_kv=T([4, 3], dtype=torch.int32)), ([2, 3], [4, 3], [0, 2, 5], True)),
    ],
)  # fmt: skip
def test_lengths_of_every_layout(given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert lists(read_of(cache_operators()[FIA], given)) == expected


def test_paged_attention_has_one_query_per_row() -> None:
    given = {"key_cache": torch.zeros(4, 2, 1, 8), "value_cache": torch.zeros(4, 2, 1, 8), "block_table": T([[1], [2]])}
    read = read_of(cache_operators()["atb::_npu_paged_attention"], {**given, "context_lens": T([2, 1])})
    assert lists(read) == ([1, 1], [2, 1], None, True)


@pytest.mark.parametrize(("size", "expected"), [(None, 2), (0, 2), (4, 4)])
def test_the_block_size_is_the_argument_or_else_the_caches(size: int | None, expected: int) -> None:
    more = {} if size is None else {"block_size": size}
    assert read_of(cache_operators()[FIA], values(**more)).block_size == expected
    assert read_of(cache_operators()[FIA], values(block_table=None, actual_seq_lengths_kv=[2, 5])).block_size is None


def test_flash_attention_reads_no_cache() -> None:
    given = {"key": torch.zeros(5, 1, 8), "value": torch.zeros(5, 1, 8), "seq_len": T([2, 3])}
    read = read_of(cache_operators()["atb::_npu_flash_attention"], given)
    assert lists(read) == ([2, 3], [2, 3], None, False)


@pytest.mark.parametrize(
    "given",
    [values(input_layout="SBH", actual_seq_lengths=None), values(input_layout="BSND", actual_seq_lengths_kv=None)],
)
def test_what_is_not_understood_is_said(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="length"):
        read_of(cache_operators()[FIA], given)


def test_a_write_in_common_terms() -> None:
    given = {name: torch.full((1,), float(at)) for at, name in enumerate(
        ("key", "value", "key_cache", "value_cache", "slot_mapping"))}  # fmt: skip
    write = write_of(cache_operators()["npu::npu_scatter_pa_kv_cache"], given)
    assert [float(one) for one in (write.key, write.value, write.key_cache, write.value_cache, write.slots)] == [
        *range(5)
    ]
