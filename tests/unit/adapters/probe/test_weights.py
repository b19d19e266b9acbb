"""The audit of live weights against a checkpoint's files, on small modules with fused parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from adapters.probe.weights import DIFFERS, EQUAL, NOT_OBSERVABLE, Audited, LiveWeights, read_audits, write_audit
from align.checkpoints.table import Structure

#: 4 query heads, 2 key heads of 2 channels, hidden 6, intermediate 8, vocabulary 10.
WHOLE = Structure(
    tags=("all", "gqa", "dense", "qwen3"),
    layers=2,
    hidden=6,
    heads=4,
    kv_heads=2,
    head_dim=2,
    intermediate=8,
    vocab=10,
    eps=1e-6,
    rope={},
    scale=1.0,
)
Q, K, V = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")
GATE, UP = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
DOWN, HEAD, EMBED = "model.layers.1.mlp.down_proj.weight", "lm_head.weight", "model.embed_tokens.weight"


def checkpoint(bias: bool = False, tied: bool = False) -> dict[str, Tensor]:
    """A checkpoint as Hugging Face names it, in bfloat16."""
    torch.manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {EMBED: (10, 6), "model.norm.weight": (6,)}
    if not tied:
        shapes[HEAD] = (10, 6)
    for layer in range(2):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{norm}.weight"] = (6,)
        for part, rows in (("q", 8), ("k", 4), ("v", 4)):
            shapes[f"{at}self_attn.{part}_proj.weight"] = (rows, 6)
            if bias:
                shapes[f"{at}self_attn.{part}_proj.bias"] = (rows,)
        for part in "qk":
            shapes[f"{at}self_attn.{part}_norm.weight"] = (2,)
        shapes[f"{at}self_attn.o_proj.weight"] = (6, 8)
        shapes |= {f"{at}mlp.{part}_proj.weight": (8, 6) for part in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (6, 8)
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}


class Holder(nn.Module):
    """A module whose parameters have the given dotted names."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in parameters.items():
            owner: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, nn.Parameter(value.clone(), requires_grad=False))


def live(tensors: dict[str, Tensor], tp: int = 1, rank: int = 0, vocab: int = 10) -> dict[str, Tensor]:
    """A rank's parameters as engines fuse, split and pad them."""
    copies = max(1, tp // 2)
    keys, key_rank = tp // copies, rank // copies
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if any(f".{part}_proj." in name for part in ("k", "v", "up")):
            continue  # with its fusion
        if ".q_proj." in name:
            k, v = tensors[name.replace("q_proj", "k_proj")], tensors[name.replace("q_proj", "v_proj")]
            parts = [tensor.chunk(tp)[rank], k.chunk(keys)[key_rank], v.chunk(keys)[key_rank]]
            found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".gate_proj." in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor.chunk(tp)[rank], up.chunk(tp)[rank]])
        elif ".o_proj." in name or ".down_proj." in name:
            found[name] = tensor.chunk(tp, dim=1)[rank]
        elif name in (EMBED, HEAD):
            padded = torch.cat([tensor, torch.zeros(vocab - 10, 6, dtype=tensor.dtype)])
            found[name] = padded.chunk(tp)[rank]
        else:
            found[name] = tensor
    return found


def audit(
    directory: Path,
    stored: dict[str, Tensor],
    parameters: dict[str, Tensor],
    structure: Structure = WHOLE,
    rank: int = 0,
    engine: str = "",
) -> dict[str, Audited]:
    save_file(stored, directory / "model.safetensors")
    weights = LiveWeights(Holder(parameters), structure, rank, rank, engine)
    records = list(weights.audit(directory))
    assert len({record.parameter for record in records}) == len(records)
    return {record.parameter: record for record in records}


def statuses(records: dict[str, Audited]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, record in records.items():
        found.setdefault(record.status, set()).add(name)
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_weights_as_loaded_are_equal(tmp_path: Path, bias: bool) -> None:
    stored = checkpoint(bias)
    assert statuses(audit(tmp_path, stored, live(stored))) == {EQUAL: set(stored)}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("vocab", [12, 16])
def test_every_rank_is_compared_with_its_share(tmp_path: Path, tp: int, vocab: int) -> None:
    stored = checkpoint(bias=True)
    for rank in range(tp):
        records = audit(tmp_path, stored, live(stored, tp, rank, vocab), replace(WHOLE, tp=tp), rank)
        assert statuses(records) == {EQUAL: set(stored)}, f"rank {rank} of {tp}"
        assert {record.rank for record in records.values()} == {rank}


def test_the_share_of_another_rank_differs(tmp_path: Path) -> None:
    stored = checkpoint()
    found = statuses(audit(tmp_path, stored, live(stored, 2, 1, 12), replace(WHOLE, tp=2), rank=0))
    split = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed", "lm_head")
    assert found[DIFFERS] == {name for name in stored if any(part in name for part in split)}


@pytest.mark.parametrize(
    ("tensor", "row"), [(Q, 5), (K, 0), (V, 3), (GATE, 7), (UP, 2), (DOWN, 4), (HEAD, 9), (EMBED, 1)]
)
def test_one_changed_row_is_named(tmp_path: Path, tensor: str, row: int) -> None:
    stored = checkpoint()
    changed = {**stored, tensor: stored[tensor].clone()}
    changed[tensor][row] *= 1.02
    records = audit(tmp_path, stored, live(changed))
    assert statuses(records)[DIFFERS] == {tensor}
    record = records[tensor]
    assert (record.rows, record.rows_total) == ((row,), 1)
    expected = (changed[tensor].double() - stored[tensor].double()).abs().max()
    assert record.max_abs == pytest.approx(float(expected), rel=1e-6)


def test_rows_are_those_of_the_whole_tensor(tmp_path: Path) -> None:
    stored = checkpoint()
    changed = {**stored, K: stored[K].clone(), HEAD: stored[HEAD].clone(), UP: stored[UP].clone()}
    changed[K][3] += 1
    changed[HEAD][8] += 1
    changed[UP][6] += 1
    records = audit(tmp_path, stored, live(changed, 2, 1, 12), replace(WHOLE, tp=2), rank=1)
    assert {name: records[name].rows for name in statuses(records)[DIFFERS]} == {K: (3,), HEAD: (8,), UP: (6,)}


def test_what_is_said_of_a_difference(tmp_path: Path) -> None:
    stored = checkpoint()
    changed = {**stored, V: stored[V] + 1}
    record = audit(tmp_path, stored, live(changed))[V]
    assert (record.kind, record.layer, record.rank) == ("attn.v", 1, 0)
    assert record.live == "model.layers.1.self_attn.qkv_proj.weight[v]"
    assert (record.rows, record.rows_total) == ((0, 1, 2, 3), 4)
    many = audit(tmp_path, stored, live({**stored, EMBED: stored[EMBED] + 1}))[EMBED]
    assert (many.rows, many.rows_total) == (tuple(range(8)), 10)


def test_swapped_halves_are_both_reported(tmp_path: Path) -> None:
    stored = checkpoint()
    swapped = {**stored, GATE: stored[UP], UP: stored[GATE]}
    records = audit(tmp_path, stored, live(swapped))
    assert statuses(records)[DIFFERS] == {GATE, UP}
    assert {records[name].rows_total for name in (GATE, UP)} == {8}


@pytest.mark.parametrize("bias_of", ["q", "v"])
def test_an_element_of_a_bias(tmp_path: Path, bias_of: str) -> None:
    stored = checkpoint(bias=True)
    name = f"model.layers.0.self_attn.{bias_of}_proj.bias"
    changed = {**stored, name: stored[name].clone()}
    changed[name][2] += 0.5
    records = audit(tmp_path, stored, live(changed))
    assert statuses(records)[DIFFERS] == {name}
    assert records[name].rows == (2,)


@pytest.mark.parametrize("where", ["live", "stored", "both"])
def test_nan_equals_nan_alone(tmp_path: Path, where: str) -> None:
    stored = checkpoint()
    broken = {**stored, Q: stored[Q].clone()}
    broken[Q][3, 1] = float("nan")
    parameters = live(broken if where in ("live", "both") else stored)
    record = audit(tmp_path, broken if where in ("stored", "both") else stored, parameters)[Q]
    if where == "both":
        assert (record.status, record.rows_total, record.max_abs) == (EQUAL, 0, 0.0)
    else:
        assert (record.status, record.rows, record.max_abs) == (DIFFERS, (3,), float("inf"))


def test_a_difference_beside_equal_nans_has_its_own_size(tmp_path: Path) -> None:
    stored = checkpoint()
    stored[Q][3, 1] = float("nan")
    changed = {**stored, Q: stored[Q].clone()}
    stored[Q][5, 0], changed[Q][5, 0] = 1.0, 1.5
    record = audit(tmp_path, stored, live(changed))[Q]
    assert (record.rows, record.max_abs) == ((5,), 0.5)


def test_rows_behind_the_vocabulary_do_not_count(tmp_path: Path) -> None:
    stored = checkpoint()
    parameters = live(stored, vocab=16)
    parameters[HEAD][12] = 7.0
    assert statuses(audit(tmp_path, stored, parameters)) == {EQUAL: set(stored)}


def test_files_in_another_dtype_are_converted_as_on_loading(tmp_path: Path) -> None:
    stored = {name: tensor.float() + 1e-4 for name, tensor in checkpoint().items()}
    loaded = {name: tensor.to(torch.bfloat16) for name, tensor in stored.items()}
    assert statuses(audit(tmp_path, stored, live(loaded))) == {EQUAL: set(stored)}


# --------------------------------------------------------------------------------------------------- tied, absent


@pytest.mark.parametrize("changed", [False, True])
def test_a_tied_head_is_compared_with_the_embedding(tmp_path: Path, changed: bool) -> None:
    stored = checkpoint(tied=True)
    head = stored[EMBED].clone()
    head[4] += 1.0 if changed else 0.0
    records = audit(tmp_path, stored, live({**stored, HEAD: head}), replace(WHOLE, tied=True))
    assert records[EMBED].status == EQUAL
    assert (records[HEAD].status, records[HEAD].rows) == ((DIFFERS, (4,)) if changed else (EQUAL, ()))


def test_a_tied_model_without_a_head_of_its_own(tmp_path: Path) -> None:
    stored = checkpoint(tied=True)
    records = audit(tmp_path, stored, live(stored), replace(WHOLE, tied=True))
    assert statuses(records) == {EQUAL: set(stored)}
    weights = LiveWeights(Holder(live(stored)), replace(WHOLE, tied=True), 0, 0)
    head, untied = weights.weight("logits", None), LiveWeights(Holder(live(stored)), WHOLE, 0, 0)
    assert head is not None and torch.equal(head, stored[EMBED])
    assert untied.weight("logits", None) is None


def test_what_one_of_them_lacks_is_not_observable(tmp_path: Path) -> None:
    stored = checkpoint()
    parameters = live(stored)
    del parameters[DOWN]
    parameters["model.layers.0.extra.scale"] = torch.ones(3)
    parameters["model.layers.0.self_attn.qkv_proj.bias"] = torch.zeros(16)
    records = audit(tmp_path, stored, parameters)
    lacking = statuses(records)[NOT_OBSERVABLE]
    biases = {f"model.layers.0.self_attn.{part}_proj.bias" for part in "qkv"}
    assert lacking == {DOWN, "model.layers.0.extra.scale", *biases}
    assert records[DOWN].why == "the engine has no such parameter"
    assert records["model.layers.0.extra.scale"].why == "no rule says what it holds"
    assert {records[bias].why for bias in biases} == {"the checkpoint has no such tensor"}


def test_another_shape_is_not_observable(tmp_path: Path) -> None:
    stored = checkpoint()
    parameters = {**live(stored), DOWN: torch.zeros(6, 9)}
    record = audit(tmp_path, stored, parameters)[DOWN]
    assert (record.status, record.why) == (NOT_OBSERVABLE, "shapes differ: [6, 9] against [6, 8]")


def test_tensors_may_stand_in_several_files(tmp_path: Path) -> None:
    stored = checkpoint()
    halves = [dict(list(stored.items())[at::2]) for at in (0, 1)]
    for at, half in enumerate(halves):
        save_file(half, tmp_path / f"model-{at}.safetensors")
    weights = LiveWeights(Holder(live(stored)), WHOLE, 0, 0)
    assert {record.status for record in weights.audit(tmp_path)} == {EQUAL}


# ------------------------------------------------------------------------------------------------------ canonical


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_weight_of_every_operator(tp: int) -> None:
    stored = checkpoint(bias=True)
    for rank in range(tp):
        weights = LiveWeights(Holder(live(stored, tp, rank, 12)), replace(WHOLE, tp=tp), rank, rank)
        copies = max(1, tp // 2)

        def check(found: Tensor | None, expected: Tensor) -> None:
            assert found is not None and torch.equal(found, expected)

        check(weights.weight("attn.q", 1), stored[Q].chunk(tp)[rank])
        check(weights.weight("attn.v", 1), stored[V].chunk(tp // copies)[rank // copies])
        check(weights.weight("mlp.up", 1), stored[UP].chunk(tp)[rank])
        check(weights.weight("mlp.down_partial", 1), stored[DOWN].chunk(tp, dim=1)[rank])
        check(weights.weight("final_norm", None), stored["model.norm.weight"])
        bias = stored["model.layers.0.self_attn.q_proj.bias"]
        check(weights.bias("attn.q", 0), bias.chunk(tp)[rank])
        assert weights.weight("mid", 0) is None
        assert weights.bias("mlp.up", 0) is None


def test_a_bias_is_added_once_before_the_sum_over_ranks() -> None:
    bias = torch.randn(6)
    parameters = {**live(checkpoint(), 2, 0), "model.layers.0.self_attn.o_proj.bias": bias}
    first, second = (LiveWeights(Holder(parameters), replace(WHOLE, tp=2), rank, rank) for rank in (0, 1))
    found = first.bias("attn.o_partial", 0)
    assert found is not None and torch.equal(found, bias)
    assert second.bias("attn.o_partial", 0) is None


def test_parts_are_views_of_the_live_parameter() -> None:
    """So that a weight that is changed later is seen changed."""
    model = Holder(live(checkpoint()))
    part = LiveWeights(model, WHOLE, 0, 0).weight("attn.k", 1)
    assert part is not None
    model.get_parameter("model.layers.1.self_attn.qkv_proj.weight")[8] = 7.0
    assert part[0].tolist() == [7.0] * 6


def test_audits_of_all_ranks_are_read_back(tmp_path: Path) -> None:
    assert read_audits(tmp_path) == []
    make: Callable[[int], Audited] = lambda rank: Audited(Q, DIFFERS, "attn.q", 1, "l", rank, (1, 2), 9, float("inf"))  # noqa: E731
    for rank in (1, 0):
        write_audit(tmp_path, rank, iter([make(rank)]))
    found = read_audits(tmp_path)
    assert [record["rank"] for record in found] == [0, 1]
    assert (found[0]["rows"], found[0]["rows_total"], found[0]["max_abs"]) == ([1, 2], 9, float("inf"))
    assert not list(tmp_path.glob("*.tmp"))


QN, KN = (f"model.layers.1.self_attn.{part}_norm.weight" for part in "qk")


@pytest.mark.parametrize(
    ("tensor", "change", "holds"),
    [
        (QN, lambda stored: stored[KN], KN),
        (GATE, lambda stored: stored[UP], UP),
        (V, lambda stored: stored[K], K),
        (DOWN, lambda stored: stored[DOWN.replace("1", "0")], DOWN.replace("1", "0")),
        (DOWN, lambda stored: stored[DOWN][[1, 0, 2, 5, 4, 3]], "its own rows in another order"),
        (UP, lambda stored: torch.zeros_like(stored[UP]), "zeros"),
        (UP, lambda stored: stored[UP] * 1.02, ""),
        (Q, lambda stored: stored[Q.replace("1", "0")] + 1, ""),
    ],
)
def test_what_a_wrong_parameter_holds_is_said(
    tmp_path: Path, tensor: str, change: Callable[[dict[str, Tensor]], Tensor], holds: str
) -> None:
    stored = checkpoint()
    records = audit(tmp_path, stored, live({**stored, tensor: change(stored)}))
    assert statuses(records)[DIFFERS] == {tensor}
    assert records[tensor].holds == holds


def test_the_share_of_another_rank_is_said_to_be_one(tmp_path: Path) -> None:
    records = audit(tmp_path, checkpoint(), live(checkpoint(), 2, 1, 12), replace(WHOLE, tp=2), rank=0)
    split = [name for name, one in records.items() if one.status == DIFFERS and "embed" not in name and name != HEAD]
    assert split
    assert {records[name].holds for name in split} == {"the share of rank 1"}


def test_heads_of_another_rank_are_named(tmp_path: Path) -> None:
    """Rank 1 of two has query heads 2 and 3 and key head 1; this one's are dealt out round robin."""
    stored = checkpoint()
    mixed = {
        **stored,
        Q: stored[Q].view(4, 2, 6)[[0, 2, 1, 3]].reshape(8, 6),
        K: stored[K].view(2, 2, 6).flip(0).reshape(4, 6),
    }
    records = audit(tmp_path, stored, live(mixed, 2, 1, 12), replace(WHOLE, tp=2), rank=1)
    assert (records[Q].heads, records[Q].heads_due, records[Q].holds) == ((1, 3), (2, 3), "heads 1, 3")
    assert (records[K].heads, records[K].heads_due, records[K].holds) == ((0,), (1,), "the share of rank 0")
    assert (records[V].status, records[V].heads) == (EQUAL, ())


def test_one_rank_that_holds_all_heads_has_none_of_another(tmp_path: Path) -> None:
    stored = checkpoint()
    moved = {**stored, Q: stored[Q].view(4, 2, 6)[[1, 0, 2, 3]].reshape(8, 6)}
    assert audit(tmp_path, stored, live(moved))[Q].heads == ()


def test_norms_to_which_an_engine_adds_one_on_loading(tmp_path: Path) -> None:
    stored = checkpoint()
    adds = replace(WHOLE, norm_offset=1.0)
    norms = {name for name in stored if "norm" in name}
    kept = live(stored)
    added = {name: value + 1 if name in norms else value for name, value in kept.items()}
    other = "model.layers.0.input_layernorm.weight"
    exchanged = {**added, "model.layers.1.input_layernorm.weight": added[other]}
    for parameters, engine, differs in (
        (added, "lmdeploy", set()), (kept, "vllm", set()), (kept, "lmdeploy", norms), (added, "vllm", norms),
        (exchanged, "lmdeploy", {"model.layers.1.input_layernorm.weight"}),
    ):  # fmt: skip
        found = audit(tmp_path, stored, parameters, adds, engine=engine)
        assert {name for name, one in found.items() if one.status != EQUAL} == differs
        assert differs != {"model.layers.1.input_layernorm.weight"} or found[min(differs)].holds == other
    model = Holder(kept)
    offsets = [LiveWeights(model, adds, 0, 0, engine).norm_offset for engine in ("lmdeploy", "vllm")]
    assert offsets == [0.0, 1.0] and LiveWeights(model, WHOLE, 0, 0, "vllm").norm_offset == 0.0
