"""Right calls of every layout and size, made at random, never raise an ERROR; one wrong thing in them does."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from align.fa import Call, Context, TensorFacts, call_record, check_call, read_call
from align.fa.call import Value
from align.fa.text import parse_tensor

CAUSAL = parse_tensor("int8[2048,2048]=causal")
LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=5)
PADDED = {"BSH": "BSH", "BSND": "BSND", "BNSD": "BNSD"}


def tensor(*shape: int, dtype: str = "bfloat16") -> TensorFacts:
    return TensorFacts(tuple(shape), dtype, device="npu")


def numbers(values: Any, *shape: int, dtype: str = "int32") -> TensorFacts:
    return TensorFacts(tuple(shape), dtype, device="npu", values=tuple(values))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Of both versions, in packed and padded layouts, with and without pages, in both phases."""
    version = draw(st.sampled_from(["v1", "v2"]))
    decode, paged = draw(st.booleans()), draw(st.booleans())
    packed = paged or draw(st.booleans())
    dim, kv_heads = draw(st.sampled_from([64, 128])), draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * draw(st.sampled_from([1, 4]))
    kv = draw(LENGTHS)
    next_n = draw(st.integers(0, 2)) if decode else None
    q = [min(length, (next_n or 0) + 1) for length in kv] if decode else list(kv)
    if decode and any(length < (next_n or 0) + 1 for length in kv):
        next_n, q = 0, [1] * len(kv)
    names = {
        "v1": ("num_heads", "scale", "actual_seq_lengths", "actual_seq_lengths_kv"),
        "v2": ("num_query_heads", "softmax_scale", "actual_seq_qlen", "actual_seq_kvlen"),
    }[version]
    arguments: dict[str, Value] = {
        names[0]: heads, names[1]: dim**-0.5, "num_key_value_heads": kv_heads, "sparse_mode": 3, "atten_mask": CAUSAL,
    }  # fmt: skip
    if packed:
        ntd = not paged and draw(st.booleans())
        total, keys = sum(q), sum(kv)
        shape = (heads, total, dim) if ntd else (total, heads, dim)
        arguments["query"] = tensor(*shape)
        arguments["input_layout"] = "NTD_TND" if ntd else "TND"
        arguments[names[2]] = tuple(accumulate(q))
        if paged:
            size = draw(st.sampled_from([16, 128]))
            width = -(-max(kv) // size) + draw(st.integers(0, 2))
            needed = len(kv) * width
            arguments["key"] = arguments["value"] = tensor(needed, size, kv_heads * dim)
            order = draw(st.permutations(range(needed)))
            arguments |= {"block_size": size, "block_table": numbers(order, len(kv), width), names[3]: tuple(kv)}
        else:
            shape = (kv_heads, keys, dim) if ntd else (keys, kv_heads, dim)
            arguments |= {"key": tensor(*shape), "value": tensor(*shape), names[3]: tuple(accumulate(kv))}
    else:
        layout = draw(st.sampled_from(list(PADDED)))
        sizes = {"query": (max(q), heads), "key": (max(kv), kv_heads), "value": (max(kv), kv_heads)}
        for name, (length, count) in sizes.items():
            whole = {"B": len(kv), "S": length, "N": count, "D": dim, "H": count * dim}
            arguments[name] = tensor(*(whole[axis] for axis in layout))
        arguments |= {"input_layout": layout, names[2]: tuple(q), names[3]: tuple(kv)}
    context = Context(
        phase="decode" if decode else "prefill",
        causal=True, next_n=next_n, q_lens=tuple(q), kv_lens=tuple(kv), scale=dim**-0.5, heads=heads * 2,
        kv_heads=kv_heads * 2, ranks=2, head_dim=dim, dtype="bfloat16", device="npu",
    )  # fmt: skip
    name = "npu_fused_infer_attention_score" + ("_v2" if version == "v2" else "")
    return Call(name, arguments, context)


@settings(max_examples=150, deadline=None)
@given(calls())
def test_a_right_call_raises_no_error(call: Call) -> None:
    report = check_call(call)
    assert report.ok, report.text()
    warned = {one.rule for one in report.of("WARN")}
    assert warned <= {"fa.mask.decode-ignored"}  # one query in a padded layout, where mode 3 has no effect


@settings(max_examples=60, deadline=None)
@given(calls())
def test_a_call_survives_json(call: Call) -> None:
    assert read_call(call_record(call)) == call
    assert read_call(call_record(call)).key() == call.key()


@settings(max_examples=60, deadline=None)
@given(calls(), st.sampled_from(["heads", "scale", "mask", "lengths", "dtype"]))
def test_one_wrong_thing_in_a_right_call_is_an_error(call: Call, what: str) -> None:
    v2 = call.operator.endswith("v2")
    arguments = dict(call.arguments)
    if what == "heads":
        arguments["num_query_heads" if v2 else "num_heads"] = call.context.heads
    elif what == "scale":
        arguments.pop("softmax_scale" if v2 else "scale")
    elif what == "mask":
        arguments["atten_mask"] = parse_tensor("int8[2048,2048]=past")
    elif what == "lengths":
        name = "actual_seq_kvlen" if v2 else "actual_seq_lengths_kv"
        given_lengths = arguments[name]
        assert isinstance(given_lengths, tuple)
        arguments[name] = (*given_lengths[:-1], given_lengths[-1] + 1)
    else:
        arguments["key"] = TensorFacts(arguments["key"].shape, "float16")  # type: ignore[union-attr]
    assert not check_call(Call(call.operator, arguments, call.context)).ok
