"""Which values are kept: within a budget, and where something is beyond."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.base import Request
from align.checkpoints.table import Structure, structure_of
from align.errors import UserError
from align.run import recording

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 100,
    "num_hidden_layers": 3,
}
REQUESTS = (Request("a", (1, 2, 3), 4), Request("b", (5,), 2))


@pytest.fixture
def structure() -> Structure:
    return structure_of(CONFIG)


def test_the_estimate_counts_every_element(structure: Structure) -> None:
    rows = (3 + 4) + (1 + 2)
    assert recording.rows_of(REQUESTS) == rows
    hidden, heads, kv, mlp = 32, 4 * 8, 2 * 8, 48
    layer = hidden * 2  # block_in, attn_norm
    layer += heads + 2 * kv + heads + kv + heads + kv  # q k v, q_norm k_norm, q_rope k_rope
    layer += 2 * kv + heads + hidden  # key_states value_states, out, o
    layer += hidden * 2 + mlp * 3 + hidden  # mid, mlp_norm, gate up act, down
    model = hidden * 3  # embed, final_in, final_norm
    logits = 2 * 4 * 100  # requests × longest × vocabulary
    expected = 2 * (rows * (3 * layer + model) + logits) + 3 * rows * 8  # slots are int64
    assert recording.estimated_bytes(structure, REQUESTS) == expected


def test_everything_is_kept_within_the_budget(structure: Structure, tmp_path: Path) -> None:
    need = recording.estimated_bytes(structure, REQUESTS)
    assert recording.default_values(structure, REQUESTS, need) == ("*",)
    small = recording.first_look(tmp_path, structure, REQUESTS, need - 1)
    kept = [str(name) for name in structure.names() if recording.kept(str(name), small.values)]
    assert [name for name in kept if name.startswith("layers.")] == [
        str(name) for name in structure.names() if name.layer == 0
    ]
    assert {"embed", "final_in", "final_norm", "logits"} <= set(kept)
    assert small.digest
    assert small.residual
    assert small.directory == str(tmp_path)


def test_layer_patterns_do_not_reach_other_layers() -> None:
    assert recording.kept("layers.1.attn.q", (recording.layer_pattern(1),))
    assert not recording.kept("layers.11.attn.q", (recording.layer_pattern(1),))


def test_what_the_user_asks_for_replaces_the_choice(structure: Structure, tmp_path: Path) -> None:
    look = recording.first_look(tmp_path, structure, REQUESTS, 10**9, ("layers.*.attn.q",))
    assert look.values == ("layers.*.attn.q",)


def test_a_lean_look_keeps_no_values_unless_asked_for(structure: Structure, tmp_path: Path) -> None:
    look = recording.first_look(tmp_path, structure, REQUESTS, 10**9, lean=True)
    assert (look.values, look.lean, look.digest, look.residual) == ((), True, True, True)
    assert recording.first_look(tmp_path, structure, REQUESTS, 10**9, ("logits",), lean=True).values == ("logits",)


def test_a_lean_recording_does_not_go_with_several_ranks() -> None:
    recording.check_lean(True, 1)
    recording.check_lean(False, 2)
    with pytest.raises(UserError, match="tensor parallelism") as caught:
        recording.check_lean(True, 2)
    assert "--values-budget" in caught.value.hint
