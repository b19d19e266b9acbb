"""What a rank writes is what the driver reads, ranks joined, and whatever a killed worker leaves can be read."""

from __future__ import annotations

import itertools
import json
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapters.base import RowSpan
from align.checkpoints.shards import Shard
from align.checkpoints.table import kinds
from align.trace.format import StepEntry
from align.trace.reader import Trace
from align.trace.writer import TraceWriter

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 12,
    "vocab_size": 16,
}
Q, K, PARTIAL = "layers.0.attn.q", "layers.1.attn.k", "layers.1.attn.o_partial"


def manifest(directory: Path, tp: int = 1, **changes: Any) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    plain = {"schema": 1, "dtype": "bfloat16", "model": MODEL, "layout": {"tp": tp, "dp": 1, "ep": 1}, **changes}
    (directory / "trace.json").write_text(json.dumps(plain))


def write(
    directory: Path, tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard], rank: int, tp: int
) -> None:
    """A rank with one step."""
    writer = TraceWriter(directory, rank, rank, tp, shards)
    rows = next(iter(tensors.values())).shape[0]
    writer.write_step(StepEntry(0, "prefill", (RowSpan("a", 0, rows),)), tensors)
    writer.close()


def joined(directory: Path, name: str, parts: Sequence[torch.Tensor], shards: Sequence[Shard | None]) -> Any:
    """What the trace says of one checkpoint, given each rank's part."""
    manifest(directory, tp=len(parts))
    kind = name.removeprefix("layers.0.").removeprefix("layers.1.")
    for rank, (part, shard) in enumerate(zip(parts, shards, strict=True)):
        write(directory, {name: part}, {} if shard is None else {kind: shard}, rank, len(parts))
    return Trace(directory).joined(0, name)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


# ---------------------------------------------------------------------------------------------------- round trip


def test_values_are_read_bit_by_bit(tmp_path: Path) -> None:
    awkward = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, 3.0e38, 1 / 3])
    written = {
        **{f"layers.0.attn.q#{dtype}": awkward.to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)},
        "token_ids": torch.tensor([0, -1, 2**62]),
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
        Q: torch.randn(3, 4, 2).to(torch.bfloat16),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "empty": torch.empty(0, 4),
    }
    manifest(tmp_path)
    writer = TraceWriter(tmp_path, 0)
    size = writer.write_step(StepEntry(5, "mixed", (RowSpan("a", 2, 3, 1),), sampled=(0, 2)), written)
    trace = Trace(tmp_path)
    (entry,) = trace.steps()
    assert entry == StepEntry(5, "mixed", (RowSpan("a", 2, 3, 1),), file=entry.file, bytes=size, sampled=(0, 2))
    assert (tmp_path / "rank0" / entry.file).stat().st_size == size
    assert trace.keys(0, 5) == set(written)
    for key, value in written.items():
        read = trace.tensor(0, 5, key)
        assert read is not None
        assert (read.dtype, read.shape, bits(read)) == (value.dtype, value.shape, bits(value)), key
    assert trace.structure.heads == 4
    assert (trace.ranks, trace.dtype, trace.shard(0, "attn.q")) == ((0,), "bfloat16", None)


def test_sums_of_a_phase_are_replaced_and_read(tmp_path: Path) -> None:
    manifest(tmp_path)
    writer = TraceWriter(tmp_path, 0)
    writer.write_accumulated("digest", "prefill", {"embed#ch": torch.zeros(4, 8)})
    size = writer.write_accumulated("digest", "prefill", {"embed#ch": torch.ones(4, 8)})
    writer.close()
    trace = Trace(tmp_path)
    found = trace.accumulated(0, "digest", "prefill")
    assert {key: value.tolist() for key, value in found.items()} == {"embed#ch": torch.ones(4, 8).tolist()}
    assert (tmp_path / "rank0" / "digest-prefill.safetensors").stat().st_size == size
    assert trace.accumulated(0, "digest", "decode") == {}
    assert trace.accumulated(0, "residual", "prefill") == {}


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    manifest(tmp_path)
    write(tmp_path, {Q: torch.ones(1, 4, 2)}, {}, 0, 1)
    trace = Trace(tmp_path)
    assert trace.tensor(0, 0, K) is None
    assert trace.tensor(0, 1, Q) is None
    assert trace.keys(0, 1) == frozenset()
    assert trace.joined(0, K) is None
    with pytest.raises(ValueError, match="is not a checkpoint"):
        trace.joined(0, "attn.nothing")


def test_dummy_steps_are_marked_and_hold_nothing(tmp_path: Path) -> None:
    manifest(tmp_path)
    writer = TraceWriter(tmp_path, 0)
    writer.write_dummy(0)
    writer.write_step(StepEntry(0, "decode", (RowSpan("a", 0, 1),)), {Q: torch.ones(1, 4, 2)})
    writer.close()
    trace = Trace(tmp_path)
    assert [entry.dummy for entry in trace.steps()] == [True, False]
    assert trace.keys(0, 0) == {Q}


def test_a_closed_trace_can_be_read_again(tmp_path: Path) -> None:
    manifest(tmp_path)
    write(tmp_path, {Q: torch.ones(1, 4, 2)}, {}, 0, 1)
    trace = Trace(tmp_path)
    for _ in range(2):
        assert trace.tensor(0, 0, Q) is not None
        trace.close()


def test_more_steps_than_files_may_be_open(tmp_path: Path) -> None:
    manifest(tmp_path)
    writer = TraceWriter(tmp_path, 0)
    for step in range(200):
        writer.write_step(StepEntry(step, "decode", (RowSpan("a", step, 1),)), {Q: torch.full((1, 4, 2), float(step))})
    writer.close()
    trace = Trace(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    already = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (already + 100, hard))
    try:
        for step in range(200):
            value = trace.tensor(0, step, Q)
            assert value is not None
            assert value.unique().tolist() == [step]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --------------------------------------------------------------------------------------------------- what is left


def two_steps(directory: Path) -> Path:
    manifest(directory)
    writer = TraceWriter(directory, 0)
    for step in range(2):
        writer.write_step(StepEntry(step, "decode", (RowSpan("a", step, 1),)), {Q: torch.full((1, 4, 2), float(step))})
    writer.close()
    return directory / "rank0" / "steps.jsonl"


def test_a_cut_last_line_is_a_step_that_did_not_happen(tmp_path: Path) -> None:
    path = two_steps(tmp_path)
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines()[-1]) + 1):
        path.write_bytes(whole[:-cut])
        assert [entry.step for entry in Trace(tmp_path).steps()] == [0]
    path.write_bytes(b"")
    assert Trace(tmp_path).steps() == ()
    path.unlink()
    assert Trace(tmp_path).steps() == ()


def test_lines_are_there_before_the_worker_ends(tmp_path: Path) -> None:
    manifest(tmp_path)
    writer = TraceWriter(tmp_path, 0)
    for step in range(3):
        writer.write_step(StepEntry(step, "decode", (RowSpan("a", step, 1),)), {Q: torch.ones(1, 4, 2)})
        assert len(Trace(tmp_path).steps()) == step + 1
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("line", [b"no json\n", b"{}\n", b"[1]\n", b"\xff\xfe\n"])
def test_a_damaged_line_names_its_file(tmp_path: Path, line: bytes) -> None:
    path = two_steps(tmp_path)
    path.write_bytes(line + path.read_bytes())
    with pytest.raises(ValueError, match=r"rank0/steps\.jsonl cannot be read"):
        Trace(tmp_path).steps()


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def overwrite(path: Path) -> None:
    path.write_bytes(b"\xff" * 64)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut_short, overwrite, empty, Path.unlink])
def test_a_damaged_step_names_its_file_and_leaves_the_others(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    two_steps(tmp_path)
    damage(tmp_path / "rank0" / "step00001.safetensors")
    trace = Trace(tmp_path)
    for read in (lambda: trace.tensor(0, 1, Q), lambda: trace.keys(0, 1), lambda: trace.joined(1, Q)):
        with pytest.raises(ValueError, match=r"rank0/step00001\.safetensors cannot be read"):
            read()
    assert trace.tensor(0, 0, Q) is not None


@pytest.mark.parametrize("damage", [cut_short, overwrite, empty])
def test_damaged_sums_name_their_file(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    manifest(tmp_path)
    writer = TraceWriter(tmp_path, 0)
    writer.write_accumulated("residual", "decode", {"embed#res_ch": torch.ones(3, 8)})
    damage(tmp_path / "rank0" / "residual-decode.safetensors")
    with pytest.raises(ValueError, match=r"residual-decode\.safetensors cannot be read"):
        Trace(tmp_path).accumulated(0, "residual", "decode")


def test_a_directory_that_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no trace: trace\.json is missing"):
        Trace(tmp_path / "nowhere")
    manifest(tmp_path)
    with pytest.raises(ValueError, match="holds no rank's records"):
        Trace(tmp_path)
    (tmp_path / "rank0").mkdir()
    with pytest.raises(ValueError, match=r"rank\.json is missing"):
        Trace(tmp_path)
    write(tmp_path, {Q: torch.ones(1, 4, 2)}, {}, 0, 1)
    (tmp_path / "ranking.txt").write_text("not a rank")
    assert Trace(tmp_path).ranks == (0,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"trace\.json cannot be read"),
        ("[]", "holds a list, not an object"),
        ('{"schema": 3}', r"has schema 3; this version reads \(1, 2\)"),
        ("{}", "has schema None"),
        ('{"schema": 1, "dtype": "bfloat16"}', "does not say model, layout"),
        ('{"schema": 2, "dtype": "bfloat16"}', "does not say model, layout"),
    ],
)
def test_a_manifest_that_does_not_fit(tmp_path: Path, text: str, words: str) -> None:
    two_steps(tmp_path)
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        Trace(tmp_path)


def test_an_architecture_without_a_table_is_said_when_it_matters(tmp_path: Path) -> None:
    two_steps(tmp_path)
    manifest(tmp_path, model={**MODEL, "architectures": ["Other"]})
    trace = Trace(tmp_path)
    assert len(trace.steps()) == 2
    with pytest.raises(ValueError, match="no checkpoints are defined for Other"):
        _ = trace.structure


# -------------------------------------------------------------------------------------------------------- joining


def test_two_ranks_by_hand(tmp_path: Path) -> None:
    q = torch.arange(24.0).reshape(3, 4, 2)
    parts = [torch.arange(24.0).reshape(3, 4, 2)[:, :2], torch.arange(24.0).reshape(3, 4, 2)[:, 2:]]
    found = joined(tmp_path, Q, parts, [Shard(0, 2, 4), Shard(2, 2, 4)])
    assert found.tolist() == q.tolist()


@given(st.data())
def test_any_sharding_joins_to_the_whole(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Cut anywhere, each part held by one rank or more, ranks in any order."""
    name = data.draw(st.sampled_from(("layers.0.attn.q", "layers.1.attn.v", "layers.0.mlp.act")))
    kind = name.partition(".")[2].partition(".")[2]
    total = data.draw(st.integers(1, 7))
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=3))})
    pieces = [Shard(start, end - start, total) for start, end in itertools.pairwise(cuts)]
    held = [piece for piece in pieces for _ in range(data.draw(st.integers(1, 2)))]
    held = data.draw(st.permutations(held))
    dtype = data.draw(st.sampled_from((torch.bfloat16, torch.float32)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    shape = (3, total) if len(kinds()[kind].axes) == 2 else (3, total, 2)
    whole = torch.randn(shape, generator=generator).to(dtype)
    parts = [whole[:, piece.start : piece.start + piece.count] for piece in held]
    found = joined(tmp_path_factory.mktemp("trace"), name, parts, held)
    assert (found.dtype, found.shape, bits(found)) == (whole.dtype, whole.shape, bits(whole))


def test_copies_are_counted_once_and_must_agree(tmp_path: Path) -> None:
    one, two = torch.randn(3, 1, 2), torch.randn(3, 1, 2)
    shards = [Shard(0, 1, 2), Shard(0, 1, 2), Shard(1, 1, 2), Shard(1, 1, 2)]
    assert torch.equal(joined(tmp_path / "a", K, [one, one, two, two], shards), torch.cat([one, two], dim=1))
    other = two.clone()
    other[2, 0, 1] += 1e-6
    with pytest.raises(ValueError, match=r"step 0: layers\.1\.attn\.k differs between ranks 2 and 3"):
        joined(tmp_path / "b", K, [one, one, two, other], shards)


def test_what_every_rank_holds_must_agree_too(tmp_path: Path) -> None:
    mid = torch.randn(3, 8)
    name = "layers.0.mid"
    assert torch.equal(joined(tmp_path / "a", name, [mid, mid.clone()], [None, None]), mid)
    with pytest.raises(ValueError, match=r"layers\.0\.mid differs between ranks 0 and 1"):
        joined(tmp_path / "b", name, [mid, mid + 1], [None, None])


def test_copies_of_nan_agree(tmp_path: Path) -> None:
    mid = torch.full((2, 8), float("nan"))
    assert joined(tmp_path / "a", "layers.0.mid", [mid, mid.clone()], [None, None]).isnan().all()
    with pytest.raises(ValueError, match="differs between"):
        joined(tmp_path / "b", "layers.0.mid", [mid, torch.zeros(2, 8)], [None, None])


def test_summands_are_added_in_float32(tmp_path: Path) -> None:
    """1 and 2^-9 have no sum in bfloat16."""
    parts = [torch.full((2, 8), 1.0, dtype=torch.bfloat16), torch.full((2, 8), 2.0**-9, dtype=torch.bfloat16)]
    found = joined(tmp_path, PARTIAL, parts, [None, None])
    assert found.dtype == torch.float32
    assert found.unique().tolist() == [1 + 2.0**-9]


def test_logits_of_the_ranks_that_sample(tmp_path: Path) -> None:
    manifest(tmp_path, tp=2)
    logits = torch.randn(1, 16)
    write(tmp_path, {"embed": torch.ones(1, 8)}, {}, 0, 2)
    write(tmp_path, {"embed": torch.ones(1, 8), "logits": logits}, {}, 1, 2)
    found = Trace(tmp_path).joined(0, "logits")
    assert found is not None
    assert torch.equal(found, logits)


def test_a_rank_that_lacks_its_part(tmp_path: Path) -> None:
    manifest(tmp_path, tp=2)
    shards = [Shard(0, 2, 4), Shard(2, 2, 4)]
    write(tmp_path, {Q: torch.ones(1, 2, 2)}, {"attn.q": shards[0]}, 0, 2)
    write(tmp_path, {K: torch.ones(1, 1, 2)}, {"attn.q": shards[1]}, 1, 2)
    assert Trace(tmp_path).joined(0, Q) is None


@pytest.mark.parametrize(
    "shards",
    [
        (Shard(0, 2, 5), Shard(3, 2, 5)),  # a gap
        (Shard(0, 2, 4), Shard(1, 2, 4)),  # an overlap whose length fits
        (Shard(1, 2, 4), Shard(3, 2, 4)),  # no beginning
        (Shard(0, 2, 6), Shard(2, 2, 6)),  # no end
        (Shard(0, 2, 4), Shard(0, 2, 4)),  # one half alone
    ],
)
def test_parts_that_make_no_whole(tmp_path: Path, shards: tuple[Shard, Shard]) -> None:
    with pytest.raises(ValueError, match=r"step 0: .*layers\.0\.attn\.q"):
        joined(tmp_path, Q, [torch.ones(3, 2, 2), torch.ones(3, 2, 2)], shards)


@pytest.mark.parametrize("name", [Q, PARTIAL, "layers.0.mid"])
def test_ranks_with_other_numbers_of_rows(tmp_path: Path, name: str) -> None:
    shape = (2, 2) if name == Q else (8,)
    shards = [Shard(0, 2, 4), Shard(2, 2, 4)] if name == Q else [None, None]
    with pytest.raises(ValueError, match=r"different numbers of rows"):
        joined(tmp_path, name, [torch.ones(3, *shape), torch.ones(2, *shape)], shards)


def test_steps_of_another_rank(tmp_path: Path) -> None:
    manifest(tmp_path, tp=2)
    for rank in (10, 9):
        write(tmp_path, {Q: torch.ones(rank, 2, 2)}, {"attn.q": Shard(0, 2, 4)}, rank, 2)
    trace = Trace(tmp_path)
    assert trace.ranks == (9, 10)
    assert trace.steps(10)[0].rows == (RowSpan("a", 0, 10),)
    assert trace.shard(10, "attn.q") == Shard(0, 2, 4)
