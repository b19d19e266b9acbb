"""How much memory golden takes, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.checkpoints.table import structure_of
from align.golden.record import load_model
from align.golden.size import TooLargeError, available_bytes, needed_bytes, parameter_count, refuse_too_large
from tests.unit.align.golden import tiny


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_as_the_model_has_them(tmp_path: Path, tied: bool) -> None:
    info = tiny.build(tmp_path, "Qwen3", tie_word_embeddings=tied)
    assert parameter_count(info) == sum(one.numel() for one in load_model(info).parameters())


def test_bytes_by_hand() -> None:
    structure = structure_of({**tiny.SIZES, "architectures": ["LlamaForCausalLM"]})
    heads, kv, narrow = 4 * 8, 2 * 8, 48
    # block_in, attn_norm, o, mid, mlp_norm, down; q, q_rope, out; k, v, k_rope, key, value; slot; gate, up, act
    layer = 6 * 32 + 3 * heads + 5 * kv + 1 + 3 * narrow
    row = 2 * layer + 3 * 32 + 64
    assert needed_bytes(1000, structure, [3, 10]) == round(4 * (1300 + 3 * 4 * 100 + row * 10))


def test_the_number_is_said() -> None:
    refuse_too_large(10, 10, 1)
    with pytest.raises(TooLargeError, match=r"about 41\.60 GB for 8000 million .* 16\.00 GB"):
        refuse_too_large(round(8e9 * 4 * 1.3), 16 * 10**9, 8 * 10**9)


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    groups.mkdir()
    unlimited = available_bytes(proc, groups)
    (groups / "memory.max").write_text("5000\n")
    (groups / "memory.current").write_text("3000\n")
    assert available_bytes(proc, groups) == 2000 < unlimited
