"""The judge is silent on right kernels, whatever their numerics, and names small faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adapters.probe.residual_sums import Sums
from align.checkpoints import recompute
from align.checkpoints.bounds import unit_roundoff
from align.checkpoints.recompute import Exact
from align.compare.residual import ResidualPolicy, ResidualVerdict, judge, largest_of, shown_by
from align.sentences import text_of
from tests.unit.align.checkpoints import eager

Tensor = torch.Tensor
BF16 = torch.bfloat16
both_dtypes = pytest.mark.parametrize("dtype", eager.DTYPES, ids=str)
seeds = pytest.mark.parametrize("seed", range(3))


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def verdict(operator: str, exact: Exact, recorded: Tensor, dtype: torch.dtype | None = None) -> ResidualVerdict:
    """Judge the rows ``[R, *channels]`` of one layer."""
    dtype = dtype or recorded.dtype
    sums = Sums(1, recorded.shape[0], recorded.shape[1:], unit_roundoff(dtype))
    sums.add(0, Exact(exact.value[None], exact.magnitude[None].clone()), recorded[None])
    largest = sums.largest(torch.arange(recorded.shape[0]))[0]
    return judge(
        "layers.0.checkpoint",
        operator,
        ResidualPolicy.for_dtype(str(dtype).removeprefix("torch.")),
        tokens=sums.tokens[0],
        largest=largest,
        channels=sums.channels[0].reshape(3, *recorded.shape[1:]),
        channel_rows=recorded.shape[0],
        row_names=[("r0", row) for row in range(recorded.shape[0])],
        largest_name=("r0", int(largest[1])),
    )


def silent(found: ResidualVerdict) -> None:
    assert (found.verdict, found.why) == ("within", "")


def rows_of_every_sort(dtype: torch.dtype, seed: int, width: int = 128) -> Tensor:
    """Rows with outlier channels, of very different sizes, equal to each other, and zero."""
    x = normal(48, width, dtype=dtype, seed=seed)
    x[:16, 5] = 2000
    x[16:24] *= 1e-3
    x[24:40] = x[24]
    x[40] = 0
    return x


@both_dtypes
@seeds
@pytest.mark.parametrize("kernel", eager.NORMS, ids=lambda one: one.__name__)
def test_silent_on_right_norms(kernel: Callable[..., Tensor], seed: int, dtype: torch.dtype) -> None:
    x, weight = rows_of_every_sort(dtype, seed), normal(128, dtype=dtype, seed=9)
    weight[3] = 1e-4
    silent(verdict("rms_norm", recompute.rms_norm(x, weight, 1e-5), kernel(x, weight, 1e-5)))
    heads = x.view(48, 4, 32)
    exact = recompute.rms_norm(heads, weight[:32], 1e-5)
    silent(verdict("rms_norm", exact, kernel(heads, weight[:32], 1e-5)))


@both_dtypes
@seeds
def test_silent_on_a_fused_norm_of_the_unrounded_sum(seed: int, dtype: torch.dtype) -> None:
    a, b = rows_of_every_sort(dtype, seed), normal(48, 128, dtype=dtype, seed=seed + 10)
    weight = normal(128, dtype=dtype, seed=9)
    exact = recompute.rms_norm(a + b, weight, 1e-5)
    silent(verdict("rms_norm", exact, eager.norm_of_sum(a, b, weight, 1e-5)))
    silent(verdict("add", recompute.add(a, b), a + b))
    silent(verdict("add", recompute.add(a, -a + b * 0), a + (-a + b * 0)))


@both_dtypes
@seeds
@pytest.mark.parametrize("kernel", eager.LINEARS, ids=lambda one: one.__name__)
def test_silent_on_right_products(kernel: Callable[..., Tensor], seed: int, dtype: torch.dtype) -> None:
    x, weight = rows_of_every_sort(dtype, seed), normal(96, 128, dtype=dtype, seed=9, scale=0.1)
    weight[7] = 0
    weight[8] *= 1e-3
    silent(verdict("linear", recompute.linear(x, weight), kernel(x, weight)))
    for row in (0, 40):
        silent(verdict("linear", recompute.linear(x[row : row + 1], weight), kernel(x[row : row + 1], weight)))


@both_dtypes
def test_silent_on_a_sum_that_is_rounded_before_the_bias(dtype: torch.dtype) -> None:
    x, weight, bias = (
        normal(48, 128, dtype=dtype),
        normal(96, 128, dtype=dtype, seed=9),
        normal(96, dtype=dtype, seed=2),
    )
    bias *= 20
    recorded = eager.linear_internal(x, weight) + bias
    silent(verdict("linear", recompute.linear(x, weight, bias), recorded))


@both_dtypes
@seeds
@pytest.mark.parametrize("kernel", eager.ROPES, ids=lambda one: one.__name__)
def test_silent_on_right_rotations(kernel: Callable[..., Tensor], seed: int, dtype: torch.dtype) -> None:
    x = rows_of_every_sort(dtype, seed).view(48, 2, 64)
    inverse, _ = recompute.rope_frequencies({"rope_theta": 1e5}, 64)
    for positions in (torch.arange(48), torch.arange(48) * 170, torch.zeros(48, dtype=torch.int64)):
        silent(verdict("rope", recompute.rope(x, positions, inverse), kernel(x, positions, inverse)))


@both_dtypes
@seeds
@pytest.mark.parametrize("kernel", eager.SILUS, ids=lambda one: one.__name__)
def test_silent_on_right_activations(kernel: Callable[..., Tensor], seed: int, dtype: torch.dtype) -> None:
    gate, up = rows_of_every_sort(dtype, seed), normal(48, 128, dtype=dtype, seed=seed + 10)
    gate[:, 11] = -12
    gate[:, 12] = -95
    up[:, 6] = 500 if dtype == BF16 else 20
    silent(verdict("silu_mul", recompute.silu_mul(gate, up), kernel(gate, up)))


@both_dtypes
@seeds
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("size", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("kernel", eager.ATTENTIONS, ids=lambda one: one.__name__)
def test_silent_on_right_attention(
    kernel: Callable[..., Tensor], size: float, window: int | None, seed: int, dtype: torch.dtype
) -> None:
    """Scores from none (all probabilities alike) to a few dozens (one key takes all)."""
    query = normal(40, 4, 64, dtype=dtype, seed=seed, scale=size)
    keys, values = normal(70, 2, 64, dtype=dtype, seed=seed + 10), normal(70, 2, 64, dtype=dtype, seed=seed + 20)
    keys[0] *= 3
    values[:, :, 9] += 50
    positions = torch.arange(30, 70)
    exact = recompute.attention(query, positions, keys, values, 0.11, window)
    silent(verdict("attention", exact, kernel(query, positions, keys, values, 0.11, window)))


@both_dtypes
@pytest.mark.parametrize("kernel", eager.ATTENTIONS, ids=lambda one: one.__name__)
def test_silent_on_attention_to_one_key_and_to_a_sink(kernel: Callable[..., Tensor], dtype: torch.dtype) -> None:
    query, keys, values = (normal(n, 4, 64, dtype=dtype, seed=n) for n in (20, 21, 22))
    keys, values = keys[:20], values[:20]
    one = (query[:1], torch.zeros(1, dtype=torch.int64), keys[:1], values[:1], 0.125)
    silent(verdict("attention", recompute.attention(*one), kernel(*one)))
    query = query[:1].expand(20, -1, -1).contiguous()
    keys = keys.clone()
    keys[0] = query[0] * 0.5  # every row looks at the first key, so that all results are nearly equal
    sink = (query, torch.arange(20), keys, values, 0.125)
    silent(verdict("attention", recompute.attention(*sink), kernel(*sink)))


@both_dtypes
def test_a_copy_is_exact_or_beyond(dtype: torch.dtype) -> None:
    x = rows_of_every_sort(dtype, 0)
    silent(verdict("identity", recompute.identity(x), x.clone()))
    changed = x.clone()
    changed[3, 17] *= 1 + 2 * torch.finfo(dtype).eps
    found = verdict("identity", recompute.identity(x), changed)
    assert found.verdict == "beyond"
    assert (found.row, found.channel, found.row_name) == (3, 17, ("r0", 3))
    assert found.worst_by in ("norm", "element")


@seeds
@pytest.mark.parametrize("kernel", [eager.norm_native, eager.norm_internal], ids=lambda one: one.__name__)
def test_a_norm_times_1_01_is_named(kernel: Callable[..., Tensor], seed: int) -> None:
    x, weight = normal(4, 576, seed=seed), normal(576, seed=9).abs()
    x[:, 5] = 2000
    found = verdict("rms_norm", recompute.rms_norm(x, weight, 1e-5), (kernel(x, weight, 1e-5).float() * 1.01).to(BF16))
    assert found.verdict == "beyond"
    assert found.gain_token is not None
    assert 1.008 < 1 + found.gain_token.value < 1.012
    assert found.row_name is not None and found.worst_by == "gain"
    assert f"{found.row_name[0]} position {found.row_name[1]} is {1 + found.gain_token.value:.5g} times" in found.why


@seeds
def test_one_row_of_a_weight_times_1_02_is_named(seed: int) -> None:
    x, weight = normal(64, 256, seed=seed), normal(256, 256, seed=9, scale=0.1)
    wrong = weight.clone()
    wrong[77] = (weight[77].float() * 1.02).to(BF16)
    found = verdict("linear", recompute.linear(x, weight), eager.linear_internal(x, wrong))
    assert found.verdict == "beyond"
    assert found.gain_channel is not None
    assert found.gain_channel.index == 77
    assert 1.015 < 1 + found.gain_channel.value < 1.025
    assert "channel 77" in found.why


@seeds
def test_8_of_256_rows_times_1_05_are_named_from_4_tokens(seed: int) -> None:
    x, weight = normal(4, 256, seed=seed), normal(256, 256, seed=9, scale=0.1)
    wrong = weight.clone()
    wrong[40:48] = (weight[40:48].float() * 1.05).to(BF16)
    found = verdict("linear", recompute.linear(x, weight), eager.linear_internal(x, wrong))
    assert found.verdict == "beyond"
    assert found.gain_channel is not None
    assert 40 <= found.gain_channel.index < 48


def test_one_head_that_is_too_large_is_named() -> None:
    x, weight = normal(64, 256), normal(256, 256, seed=9, scale=0.1)
    recorded = eager.linear_internal(x, weight).view(64, 8, 32)
    recorded[:, 5] = (recorded[:, 5].float() * 1.02).to(BF16)
    exact = recompute.linear(x, weight)
    shaped = Exact(exact.value.view(64, 8, 32), exact.magnitude.view(64, 8, 32))
    found = verdict("linear", shaped, recorded)
    assert found.gain_head is not None
    assert (found.gain_head.index, found.gain_head.beyond) == (5, True)


@both_dtypes
def test_swapped_gate_and_up_are_beyond(dtype: torch.dtype) -> None:
    gate, up = normal(4, 64, dtype=dtype), normal(4, 64, dtype=dtype, seed=1)
    assert verdict("silu_mul", recompute.silu_mul(gate, up), eager.silu_native(up, gate)).verdict == "beyond"


@both_dtypes
@seeds
@pytest.mark.parametrize("kernel", eager.ATTENTIONS, ids=lambda one: one.__name__)
def test_a_missing_key_is_beyond(kernel: Callable[..., Tensor], seed: int, dtype: torch.dtype) -> None:
    query, keys, values = (normal(n, 2, 64, dtype=dtype, seed=seed + n) for n in (1, 241, 242))
    keys, values = keys[:241], values[:241]
    exact = recompute.attention(query, torch.tensor([240]), keys, values, 0.125)
    for missing in (0, 100, 240):
        kept = torch.arange(241) != missing
        recorded = kernel(query, torch.tensor([239]), keys[kept], values[kept], 0.125)
        assert verdict("attention", exact, recorded).verdict == "beyond"


def test_what_is_not_finite_counts_unless_the_inputs_or_the_dtype_explain_it() -> None:
    x = normal(4, 32, dtype=torch.float16)
    nan = x.clone()
    nan[2, 3] = torch.nan
    found = verdict("add", recompute.add(x, x), nan + x)
    assert (found.verdict, found.non_finite) == ("beyond", 1)
    assert "not finite" in found.why
    assert (found.row, found.channel, found.row_name) == (2, 3, ("r0", 2))  # not where the largest error is
    silent(verdict("add", recompute.add(nan, x), nan + x))
    nan[2] = torch.nan
    of_nan = verdict("add", recompute.add(nan, x), nan + x)
    assert (of_nan.verdict, of_nan.rows) == ("within", 3)
    nan[:] = torch.nan
    assert verdict("add", recompute.add(nan, x), nan + x).verdict == "not observable"
    large = torch.full_like(x, 60000.0)
    silent(verdict("add", recompute.add(large, large), large + large))
    infinite = (x + x).clone()
    infinite[0, 0] = torch.inf
    assert verdict("add", recompute.add(x, x), infinite).verdict == "beyond"


def test_a_result_where_nothing_should_be_is_beyond() -> None:
    zeros = torch.zeros(2, 8, dtype=BF16)
    silent(verdict("add", recompute.add(zeros, zeros), zeros))
    assert verdict("add", recompute.add(zeros, zeros), zeros + 1).verdict == "beyond"


def test_nothing_seen_is_not_a_pass() -> None:
    policy = ResidualPolicy.for_dtype("bfloat16")
    assert judge("layers.0.attn.o", "all_reduce", policy).verdict == "not observable"
    nothing = judge("layers.0.attn.q", "linear", policy, tokens=torch.zeros(0, 3), largest=torch.zeros(4))
    assert (nothing.verdict, nothing.why) == ("not observable", "no row was recomputed")
    unknown = judge(
        "layers.0.attn.out", "attention", policy, tokens=torch.full((2, 3), torch.nan), largest=torch.zeros(4)
    )
    assert unknown.verdict == "not observable"


def test_maxima_fold_and_nan_is_the_largest() -> None:
    one, two = torch.tensor([0.5, 3, 4, 0]), torch.tensor([2.0, 1, 7, 2])
    assert largest_of([one, two]).tolist() == [2.0, 1, 7, 2]
    assert largest_of([two, one]).tolist() == [2.0, 1, 7, 2]
    assert largest_of([two, torch.tensor([torch.nan, 0, 0, 0])])[0].isnan()


def test_the_policy_survives_json() -> None:
    policy = ResidualPolicy.for_dtype("float16")
    assert ResidualPolicy.from_json(json.loads(json.dumps(policy.to_json()))) == policy
    with pytest.raises(ValueError, match="unknown dtype"):
        ResidualPolicy.for_dtype("int4")


def test_every_quoted_place_has_its_own_name() -> None:
    """The largest element, the token of the worst gain and that of the worst norm are different rows."""
    rows, width = 6, 64
    tokens = torch.zeros(rows, 3)
    tokens[:, 1] = width
    tokens[4] = torch.tensor([width * 0.1**2, width, width * 0.1])  # 1.1 times the result
    tokens[2] = torch.tensor([width * 0.2**2, width, 0.0])  # off without a gain
    tokens[1] = torch.nan  # was not recomputed, and keeps its place
    names = [("r0", 0), ("r0", 1), ("r1", 0), ("r1", 1), ("r2", 9), ("r3", 90)]
    largest = torch.tensor([99.0, 5.0, 7.0, 0.0])
    arguments: dict[str, Any] = {"tokens": tokens, "width": width, "row_names": names, "largest_name": ("r3", 90)}
    policy = ResidualPolicy.for_dtype("bfloat16")
    found = judge("layers.0.attn.o", "linear", policy, largest=largest, **arguments)
    element, gain, norm = found.why.split("; ")[0], found.why.split("; ")[1], found.why.split("; ")[3]
    assert element.endswith("(r3 position 90, channel 7)")
    assert gain.startswith("r2 position 9 is 1.1 times")
    assert norm.startswith("r1 position 0 is off by 0.2")
    assert "token" not in found.why
    broken = judge("layers.0.attn.o", "linear", policy, largest=torch.tensor([0.0, 5.0, 7.0, 1.0]), **arguments)
    assert broken.row_name == ("r3", 90)
    assert broken.why.startswith("1 element is not finite although the exact result is (r3 position 90, channel 7)")


def test_a_channel_alone_names_no_row() -> None:
    squares = torch.full((8,), 100.0)
    gain = torch.where(torch.arange(8) == 6, 0.1, 0.0)
    found = judge(
        "layers.0.attn.o",
        "linear",
        ResidualPolicy.for_dtype("bfloat16"),
        tokens=torch.tensor([[0.0, 8.0, 0.0]] * 100),
        largest=torch.tensor([0.0, 0, 0, 0]),
        channels=torch.stack([squares * gain**2, squares, squares * gain]),
        channel_rows=100,
        row_names=[("r0", row) for row in range(100)],
    )
    assert found.verdict == "beyond" and found.why.startswith("channel 6 is 1.1 times")
    assert found.row_name is None and "position" not in found.why


def test_the_fold_points_at_what_is_not_finite() -> None:
    large, broken = torch.tensor([9.0, 3, 4, 0]), torch.tensor([2.0, 1, 7, 2])
    assert largest_of([large, broken]).tolist() == [9.0, 1, 7, 2]
    assert shown_by([large, broken]) == 1 and shown_by([broken, large]) == 0 and shown_by([large, large * 2]) == 1


def test_a_head_is_named_only_where_there_are_heads() -> None:
    """Of a norm the one "head" is all of it."""
    x, weight = normal(64, 256), normal(256, seed=3)
    exact = recompute.rms_norm(x, weight, 1e-6)
    found = verdict("rms_norm", exact, (exact.value.float() * 1.01).to(BF16))
    assert "the whole of it is 1.0" in found.why and "head" not in found.why
    assert found.why == "; ".join(map(text_of, found.reasons))
    shaped = Exact(exact.value.view(64, 8, 32), exact.magnitude.view(64, 8, 32))
    apart = (shaped.value.float() * 1.01).to(BF16)
    assert "; head " in verdict("linear", shaped, apart * 1.02).why


def test_requests_and_rows_that_show_it_are_counted() -> None:
    x, weight = normal(64, 256), normal(256, seed=3)
    exact = recompute.rms_norm(x, weight, 1e-6)
    recorded = exact.value.to(BF16).clone()
    recorded[10:13] = (recorded[10:13].float() * 1.05).to(BF16)
    sums = Sums(1, 64, (256,), unit_roundoff(BF16))
    sums.add(0, Exact(exact.value[None], exact.magnitude[None].clone()), recorded[None])
    policy, largest = ResidualPolicy.for_dtype("bfloat16"), sums.largest(torch.arange(64))[0]
    names = [(f"r{row // 12}", row) for row in range(64)]  # rows 10, 11 and 12 are of r0 and r1
    told: dict[str, Any] = {"tokens": sums.tokens[0], "largest": largest, "width": 256, "row_names": names}
    found = judge("layers.0.mlp_norm", "rms_norm", policy, **told)
    assert (found.requests, found.rows_beyond, found.rows) == (("r0", "r1"), 3, 64)
    more = judge("layers.0.mlp_norm", "rms_norm", policy, **told, step_maxima=[(0.5, ("r4", 60)), (99.0, ("r5", 63))])
    assert more.requests == ("r0", "r1", "r5")
    rest = {**told, "tokens": sums.tokens[0][20:], "row_names": names[20:]}
    right = judge("layers.0.mlp_norm", "rms_norm", policy, **rest)
    assert (right.requests, right.rows_beyond) == ((), 0)
