"""Attention with a soft cap, with sinks, with both a window and its own scale: against transformers' eager code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss

from align.checkpoints import recompute
from align.checkpoints.bounds import bounds, unit_roundoff
from tests.unit.align.checkpoints import eager

Tensor = torch.Tensor
HEADS, KV_HEADS, SIZE = 4, 2, 16


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def inputs(dtype: torch.dtype, seed: int, scale: float = 1.0, rows: int = 12, span: int = 20) -> dict[str, Tensor]:
    return {
        "query": normal(rows, HEADS, SIZE, dtype=dtype, seed=seed, scale=scale),
        "positions": torch.arange(span - rows, span),
        "keys": normal(span, KV_HEADS, SIZE, dtype=dtype, seed=seed + 1, scale=scale),
        "values": normal(span, KV_HEADS, SIZE, dtype=dtype, seed=seed + 2),
    }


def mask(positions: Tensor, span: int, window: int | None, dtype: torch.dtype) -> Tensor:
    behind = positions[:, None] - torch.arange(span)[None]
    hidden = (behind < 0) | (behind >= (window or 1 << 30))
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)[None, None]


def by_transformers(
    given: dict[str, Tensor],
    dtype: torch.dtype,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The eager code of Gemma 2 or GPT-OSS in ``dtype``."""
    query, keys, values = (given[key].to(dtype).transpose(0, 1)[None] for key in ("query", "keys", "values"))
    hidden = mask(given["positions"], keys.shape[2], window, dtype)
    module: Any = SimpleNamespace(
        num_key_value_groups=HEADS // KV_HEADS, training=False, sinks=None if sinks is None else sinks.to(dtype)
    )
    if sinks is not None:
        found: Tensor = gpt_oss(module, query, keys, values, hidden, scale)[0][0]
    else:
        found = gemma2(module, query, keys, values, hidden, scaling=scale, softcap=softcap)[0][0]
    return found


def exact(given: dict[str, Tensor], scale: float, **more: Any) -> recompute.Exact:
    query, positions, keys, values = given["query"], given["positions"], given["keys"], given["values"]
    return recompute.attention(query, positions, keys, values, scale, compute=torch.float64, **more)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_soft_cap_and_window_are_gemmas(window: int | None, softcap: float | None) -> None:
    given = inputs(torch.bfloat16, 0)
    wanted = by_transformers(given, torch.float64, 0.3, window, softcap)
    found = exact(given, 0.3, window=window, softcap=softcap)
    torch.testing.assert_close(found.value, wanted, rtol=1e-6, atol=1e-7)  # their softmax is float32


def test_a_soft_cap_changes_the_result() -> None:
    given = inputs(torch.bfloat16, 0, scale=3.0)
    assert not torch.allclose(exact(given, 0.3, softcap=3.0).value, exact(given, 0.3).value, atol=1e-2)


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_are_those_of_gpt_oss(window: int | None) -> None:
    given, sinks = inputs(torch.bfloat16, 0), normal(HEADS, seed=7)
    wanted = by_transformers(given, torch.float64, 0.3, window, sinks=sinks)
    found = exact(given, 0.3, window=window, sinks=sinks)
    torch.testing.assert_close(found.value, wanted, rtol=1e-6, atol=1e-7)


def test_a_sink_takes_its_share_of_the_probability() -> None:
    keys = values = torch.ones(1, 1, 2, dtype=torch.bfloat16)
    query = torch.zeros(1, 1, 2, dtype=torch.bfloat16)  # a score of 0
    sinks = torch.tensor([0.0])
    found = recompute.attention(query, torch.tensor([0]), keys, values, 1.0, None, torch.float64, sinks=sinks)
    torch.testing.assert_close(found.value, torch.full((1, 1, 2), 0.5, dtype=torch.float64))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(eager.DTYPES),
    st.sampled_from([0.0, 0.3, 1.0, 3.0, 8.0]),
    st.sampled_from([None, 5]),
    st.sampled_from(["cap", "sinks"]),
)
def test_right_kernels_stay_within_the_bound(
    seed: int, dtype: torch.dtype, size: float, window: int | None, form: str
) -> None:
    given = inputs(dtype, seed, size)
    more: dict[str, Any] = {"softcap": 50.0} if form == "cap" else {"sinks": normal(HEADS, dtype=dtype, seed=seed + 3)}
    found = exact(given, 0.25, window=window, **more)
    limit = bounds()["attention"].max_roundings * unit_roundoff(dtype) * 1.02
    native = by_transformers(given, dtype, 0.25, window, **more)
    single = by_transformers(given, torch.float32, 0.25, window, **more).to(dtype)
    for kernel in (native, single):
        assert float(((kernel.double() - found.value).abs() / found.magnitude).max()) <= limit


@pytest.mark.parametrize("dtype", eager.DTYPES)
def test_a_forgotten_cap_or_sink_is_beyond_the_bound(dtype: torch.dtype) -> None:
    limit = bounds()["attention"].max_roundings * unit_roundoff(dtype) * 1.02
    for size, more in ((3.0, {"softcap": 5.0}), (1.0, {"sinks": normal(HEADS, dtype=dtype, seed=5)})):
        given = inputs(dtype, 0, size)
        without, found = by_transformers(given, dtype, 0.25).double(), exact(given, 0.25, **more)
        assert float(((without - found.value).abs() / found.magnitude).max()) > 3 * limit
