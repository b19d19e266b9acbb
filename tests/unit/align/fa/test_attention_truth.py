"""What the rules flag changes the result of attention, what they let pass does not: in float64, on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from align.fa import Context, check_attention
from tests.unit.align.fa.documented import SCALE, D, fused, meant

N, KV, BLOCK = 4, 2, 16
CAUSAL = torch.ones(2048, 2048, dtype=torch.int8).triu(1)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).half()


def prefill() -> tuple[dict[str, Any], Tensor]:
    """Two prompts of 3 and 5 tokens, packed, and what the model means by them."""
    q, k, v = random(8, N, D), random(8, KV, D) * 2, random(8, KV, D) + 1
    right = torch.cat([meant(q[a:b], k[a:b], v[a:b]) for a, b in ((0, 3), (3, 8))])
    arguments = {
        "query": q, "key": k, "value": v, "atten_mask": CAUSAL, "actual_seq_lengths": [3, 8],
        "actual_seq_lengths_kv": [3, 8], "num_heads": N, "num_key_value_heads": KV, "scale": SCALE,
        "input_layout": "TND", "sparse_mode": 3,
    }  # fmt: skip
    return arguments, right


def decode() -> tuple[dict[str, Any], Tensor]:
    """Two sequences of 20 and 7 tokens in pages of 16, one query each."""
    keys, values = [random(n, KV, D) * 2 for n in (20, 7)], [random(n, KV, D) + 1 for n in (20, 7)]
    q = random(2, N, D)
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    caches = []
    for rows in (keys, values):
        cache = random(4, BLOCK, KV, D) * 5
        for row, tokens in zip(table, rows, strict=True):
            for position, one in enumerate(tokens):
                cache[row[position // BLOCK], position % BLOCK] = one
        caches.append(cache.view(4, BLOCK, KV * D))
    right = torch.cat([meant(q[i : i + 1], keys[i], values[i]) for i in range(2)])
    arguments = {
        "query": q, "key": caches[0], "value": caches[1], "atten_mask": CAUSAL, "block_table": table,
        "block_size": BLOCK, "actual_seq_lengths": [1, 2], "actual_seq_lengths_kv": [20, 7], "num_heads": N,
        "num_key_value_heads": KV, "scale": SCALE, "input_layout": "TND", "sparse_mode": 3,
    }  # fmt: skip
    return arguments, right


def padded(layout: str) -> tuple[dict[str, Any], Tensor]:
    """The prompts of ``prefill``, padded to 6 tokens; only real tokens are compared."""
    packed, right = prefill()
    padded = {}
    for name, heads in (("query", N), ("key", KV), ("value", KV)):
        rows = torch.zeros(2, 6, heads, D, dtype=torch.float16)
        rows[0, :3], rows[1, :5] = packed[name][:3], packed[name][3:]
        padded[name] = rows.transpose(1, 2).contiguous() if layout == "BNSD" else rows.reshape(2, 6, heads * D)
    kept = {name: packed[name] for name in ("atten_mask", "num_heads", "num_key_value_heads", "scale", "sparse_mode")}
    lengths = {"actual_seq_lengths": [3, 5], "actual_seq_lengths_kv": [3, 5]}
    return {**padded, **kept, **lengths, "input_layout": layout}, right


def real(result: Tensor, layout: str) -> Tensor:
    if layout == "TND":
        return result
    rows = result.transpose(1, 2) if layout == "BNSD" else result.reshape(2, 6, N, D)
    return torch.cat([rows[0, :3], rows[1, :5]])


def judged(arguments: dict[str, Any], phase: str, **known: Any) -> set[str]:
    """Rules that say WARN or ERROR; the reference is right about lengths, which the step would know."""
    context = Context(phase=phase, causal=True, scale=SCALE, **known)
    found = check_attention("npu_fused_infer_attention_score", context=context, **arguments)
    return {one.rule for one in found.of("ERROR", "WARN")}


def near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() < 1e-9)


@pytest.mark.parametrize("layout", ["BSH", "BNSD"])
def test_right_padded_calls_are_right(layout: str) -> None:
    arguments, right = padded(layout)
    assert near(real(fused(**arguments), layout), right)
    assert judged(arguments, "prefill") == set()


@pytest.mark.parametrize("make", [prefill, decode])
def test_right_packed_calls_are_right(make: Any) -> None:
    arguments, right = make()
    assert near(fused(**arguments), right)
    assert judged(arguments, make.__name__) == set()


def test_decode_is_right_with_mode_3_and_with_mode_0() -> None:
    """000-Q13 forbids 3 in decode, 001's table allows it: both give the same numbers over pages."""
    arguments, right = decode()
    without = {name: one for name, one in arguments.items() if name != "atten_mask"} | {"sparse_mode": 0}
    assert near(fused(**arguments), right) and near(fused(**without), right)
    assert judged(arguments, "decode") == judged(without, "decode") == set()


PACKED = [
    ("fa.mask.transposed", {"atten_mask": CAUSAL.T.contiguous()}),
    ("fa.mask.inverted", {"atten_mask": 1 - CAUSAL}),
    ("fa.mask.diagonal", {"atten_mask": torch.ones(2048, 2048, dtype=torch.int8).triu(0)}),
    ("fa.mask.upper-open", {"atten_mask": torch.zeros_like(CAUSAL)}),
    ("fa.mask.nothing-hidden", {"atten_mask": None, "sparse_mode": 0}),
    ("fa.mask.band-future", {"sparse_mode": 4}),
    ("fa.mask.band-unbounded", {"sparse_mode": 4, "pre_tokens": 2147483647}),
    ("fa.lengths.q-raw", {"actual_seq_lengths": [3, 5], "actual_seq_lengths_kv": [3, 5]}),
    ("fa.lengths.kv-raw", {"actual_seq_lengths_kv": [3, 5]}),
    ("fa.lengths.q-decreasing", {"actual_seq_lengths": [5, 3]}),
    ("fa.lengths.q-short", {"actual_seq_lengths": [3, 7]}),
    ("fa.lengths.q-step", {"actual_seq_lengths": [4, 8]}),
    ("fa.version.scale-omitted", {"scale": ...}),
    ("fa.scale.model", {"scale": 1 / D}),
    ("fa.scale.one", {"scale": 1.0}),
    ("fa.version.kv-heads-omitted", {"num_key_value_heads": ...}),
]


@pytest.mark.parametrize(("rule", "change"), PACKED, ids=[rule for rule, _ in PACKED])
def test_what_is_flagged_in_prefill_changes_the_result(rule: str, change: dict[str, Any]) -> None:
    arguments, right = prefill()
    wrong = {name: one for name, one in {**arguments, **change}.items() if one is not ...}
    assert rule in judged(wrong, "prefill", q_lens=(3, 5))
    if rule == "fa.version.kv-heads-omitted":
        with pytest.raises(RuntimeError):  # four key heads are not there to be read
            fused(**wrong)
    else:
        assert not near(fused(**wrong), right)


PAGED = [
    ("fa.mask.left-up", {"sparse_mode": 2}),
    ("fa.lengths.kv-step", {"actual_seq_lengths_kv": [19, 6]}),  # without the token of this step
    ("fa.lengths.kv-step", {"actual_seq_lengths_kv": [20, 27]}),  # cumulative
    ("fa.lengths.zero-q", {"actual_seq_lengths": [0, 2]}),
    ("fa.lengths.covers", {"actual_seq_lengths_kv": [20, 0]}),
    ("fa.paged.table-repeat", {"block_table": torch.tensor([[3, 3], [2, 0]], dtype=torch.int32)}),
]


@pytest.mark.parametrize(("rule", "change"), PAGED)
def test_what_is_flagged_in_decode_changes_the_result(rule: str, change: dict[str, Any]) -> None:
    arguments, right = decode()
    wrong = {**arguments, **change}
    assert rule in judged(wrong, "decode", kv_lens=(20, 7))
    assert not near(fused(**wrong), right)


@pytest.mark.parametrize("layout", ["BSH", "BNSD"])
def test_cumulative_lengths_in_a_padded_layout_are_flagged_and_wrong(layout: str) -> None:
    arguments, right = padded(layout)
    wrong = {**arguments, "actual_seq_lengths_kv": [3, 8]}
    assert "fa.lengths.kv-within" in judged(wrong, "prefill")
    fits = {**arguments, "actual_seq_lengths_kv": [3, 6]}  # within the padding: only the step knows better
    assert "fa.lengths.kv-step" in judged(fits, "prefill", kv_lens=(3, 5))
    assert not near(real(fused(**fits), layout), right)


def test_mode_2_is_right_without_a_history_and_only_warned_of() -> None:
    arguments, right = prefill()
    arguments["sparse_mode"] = 2
    assert near(fused(**arguments), right)
    assert judged(arguments, "prefill") == {"fa.mask.left-up-used"}


@pytest.mark.parametrize(
    ("before", "rules"), [(2, set()), (3, {"fa.mask.band-inclusive"}), (1, {"fa.mask.band-window"})]
)
def test_a_window_counts_the_query(before: int, rules: set[str]) -> None:
    arguments, _ = prefill()
    q, k, v = (arguments[name] for name in ("query", "key", "value"))
    right = torch.cat([meant(q[a:b], k[a:b], v[a:b], window=3) for a, b in ((0, 3), (3, 8))])
    arguments.update(sparse_mode=4, pre_tokens=before, next_tokens=0)
    assert judged(arguments, "prefill", window=3) == rules
    assert near(fused(**arguments), right) == (not rules)


def test_an_ignored_window_is_flagged_and_wrong() -> None:
    arguments, full = prefill()
    q, k, v = (arguments[name] for name in ("query", "key", "value"))
    right = torch.cat([meant(q[a:b], k[a:b], v[a:b], window=3) for a, b in ((0, 3), (3, 8))])
    assert "fa.mask.window-ignored" in judged(arguments, "prefill", window=3)
    assert near(fused(**arguments), full) and not near(full, right)


def test_rope_on_one_side_changes_the_result() -> None:
    arguments, _ = prefill()
    arguments.update(
        num_heads=KV, query=arguments["query"][:, :KV], query_rope=random(8, KV, 64), key_rope=random(8, KV, 64)
    )
    both = fused(**arguments)
    del arguments["key_rope"]
    assert "fa.mla.pair" in judged(arguments, "prefill")
    assert not near(fused(**arguments), both)


def test_a_full_mask_at_the_wrong_end_is_flagged_and_wrong() -> None:
    """Two new tokens behind four: the mask's diagonal belongs to the last key."""
    arguments, _ = padded("BNSD")
    q, k, v = arguments["query"][:1, :, :2], arguments["key"][:1], arguments["value"][:1]
    right = meant(q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)).transpose(0, 1)[None]
    arguments.update(query=q, key=k, value=v, sparse_mode=0)
    del arguments["actual_seq_lengths"], arguments["actual_seq_lengths_kv"]
    place = torch.arange(6) - torch.arange(2)[:, None]
    good, bad = (
        {**arguments, "atten_mask": (place > 4)[None, None]},
        {**arguments, "atten_mask": (place > 0)[None, None]},
    )
    assert near(fused(**good), right) and not near(fused(**bad), right)
    assert "fa.mask.full-shifted" not in judged(good, "prefill")
    assert "fa.mask.full-shifted" in judged(bad, "prefill")
