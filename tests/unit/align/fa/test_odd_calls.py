"""Whatever a call looks like, the rules answer and do not raise: they run in front of the operator, in a worker."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from align.fa import Call, Context, MaskFacts, TensorFacts, check_call
from align.fa.call import MASK_PATTERNS, PATHS, PHASES, Value
from align.fa.operators import operators

SMALL = st.integers(-2, 5)
SHAPES = st.lists(st.integers(0, 4), max_size=5).map(tuple)
LENGTHS = st.lists(SMALL, max_size=4).map(tuple)
DTYPES = st.sampled_from(["bfloat16", "float16", "float32", "int8", "int32", "int64", "bool"])


@st.composite
def masks(draw: st.DrawFn, shape: tuple[int, ...]) -> MaskFacts | None:
    if len(shape) < 2 or not draw(st.booleans()):
        return None
    rows = 1
    for size in shape[:-1]:
        rows *= size
    first = draw(st.sampled_from([None, (), tuple(i % (shape[-1] + 1) for i in range(rows))]))
    return MaskFacts(draw(st.sampled_from(MASK_PATTERNS)), draw(st.integers(0, 3)), draw(st.integers(0, 3)), first)


@st.composite
def tensors(draw: st.DrawFn) -> TensorFacts:
    shape = draw(SHAPES)
    count = 1
    for size in shape:
        count *= size
    values = draw(st.none() | st.lists(SMALL, min_size=count, max_size=count).map(tuple)) if count < 30 else None
    return TensorFacts(
        shape, draw(DTYPES), draw(st.sampled_from(["", "cpu", "npu"])), draw(st.none() | st.booleans()),
        draw(st.sampled_from(["", "ND", "NZ"])), draw(st.none() | st.integers(0, 2)), values,
        nonfinite=draw(st.none() | st.integers(0, 1)), mask=draw(masks(shape)),
    )  # fmt: skip


@st.composite
def calls(draw: st.DrawFn) -> Call:
    operator = draw(st.sampled_from(list(operators().values())))
    layouts = st.sampled_from(["BSH", "BSND", "BNSD", "TND", "NTD_TND", "BNSD_NBSD", "XYZ", "Norm", "PA", "PA_NZ", ""])
    arguments: dict[str, Value] = {}
    for one in operator.arguments.values():
        if draw(st.integers(0, 3)) == 0:
            continue
        if one.tensor:
            arguments[one.name] = draw(tensors() | st.none())
        elif one.type.startswith("int["):
            arguments[one.name] = draw(LENGTHS | tensors() | st.none())
        else:
            arguments[one.name] = draw(layouts if one.type.startswith("str") else SMALL | st.floats(-1, 2) | st.none())
    if draw(st.booleans()):
        arguments["strange"] = draw(SMALL)
    number = st.none() | st.integers(0, 4)
    context = Context(
        phase=draw(st.sampled_from(["", *PHASES])), path=draw(st.sampled_from(["", *PATHS])),
        causal=draw(st.none() | st.booleans()), window=draw(number), next_n=draw(number),
        q_lens=draw(st.none() | LENGTHS), kv_lens=draw(st.none() | LENGTHS), batch=draw(number), q_len=draw(number),
        kv_len=draw(number), layout=draw(layouts), scale=draw(st.none() | st.floats(0, 1)),
        eps=draw(st.none() | st.just(1e-6)),
        head_dim=draw(number), heads=draw(number), kv_heads=draw(number), ranks=draw(st.none() | st.integers(1, 4)),
    )  # fmt: skip
    return Call(operator.name, arguments, context)


@settings(max_examples=200, deadline=None)
@given(calls())
def test_no_call_makes_the_rules_raise(call: Call) -> None:
    report = check_call(call)
    said = {one.rule for one in report.findings}
    assert not said & set(report.held) and not said & set(report.unknown)
    assert all("{" not in text for one in report.findings for text in one.said.values())
