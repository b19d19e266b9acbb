"""Attention recomputed with another scale, mask, window, soft cap or map of heads."""

from __future__ import annotations

from collections.abc import Iterator
from math import log2
from typing import Any

import torch

from align.checkpoints.recompute import Exact
from align.fits.attend import attend
from align.fits.constants import named, or_named
from align.fits.fit import Proposal
from align.fits.measured import Measured
from align.fits.operators import proposal
from align.fits.search import minimise
from align.sentences import Said, said

Tensor = torch.Tensor
#: Rows that a number is fitted on.
_ROWS = 64
#: Soft caps of published configurations.
SOFTCAPS = (50.0, 30.0, 20.0, 15.0)


def propose(measured: Measured) -> Iterator[Proposal]:
    """What each change gives; a window begins where the first row is wrong."""
    case = measured.case
    scale = case.number("scale")
    if not case.has("q", "k", "v") or scale is None:
        return
    yield from _scales(measured, scale)
    yield from _windows(measured)
    yield from _caps(measured)
    if case.has("sinks"):
        text = said("fit.sinks")
        yield proposal(measured, "attention_sinks", _run(measured, sinks=None), text, {"sinks": None})
    yield from _masks(measured)
    yield from _maps(measured)


def _run(measured: Measured, rows: Tensor | None = None, **changed: Any) -> Exact:
    """The attention of the case with some arguments changed, for all rows or some."""
    case = measured.case
    window, cap = case.parameters.get("window"), case.parameters.get("softcap")
    arguments: dict[str, Any] = {"scale": case.parameters["scale"], "window": window, "softcap": cap, **changed}
    arguments.setdefault("sinks", case.inputs.get("sinks"))
    scale = float(arguments.pop("scale"))
    keys, values = arguments.pop("keys", case.inputs["k"]), arguments.pop("values", case.inputs["v"])
    query, positions = case.inputs["q"], case.positions
    if rows is not None:
        query, positions = query[rows], positions[rows]
    return attend(query, positions, keys, values, scale, getattr(torch, case.dtype), **arguments)


def _some(measured: Measured) -> Tensor:
    """Rows to fit a number on: those that are wrong, evenly chosen."""
    wrong = torch.nonzero(measured.null.tokens).flatten()
    return wrong[torch.linspace(0, len(wrong) - 1, min(_ROWS, len(wrong))).long()]


def _scales(measured: Measured, scale: float) -> Iterator[Proposal]:
    rows = _some(measured)
    bad, inverse = measured.bad[rows], measured.bound[rows].reciprocal()

    def cost(exponent: float) -> float:
        return float(((bad - _run(measured, rows, scale=2.0**exponent).value) * inverse).square().sum())

    centre = log2(scale)
    exponent, _ = minimise(cost, [centre + step / 2 for step in range(-16, 17)], 24)
    fitted = 2.0**exponent
    names = named(fitted, measured.case.parameters, 0.01)
    ratio = fitted / scale
    ratios = [name for name in named(ratio, measured.case.parameters, 0.01) if name not in ("scale", "1/scale")]
    if abs(fitted - 1) < 0.01:
        names.insert(0, "no scale")
    found = {"scale": or_named(fitted, names), "expected": scale, "ratio": or_named(ratio, ratios)}
    text = said("fit.attention_scale", **found)
    parameters = {"scale": fitted, "expected": scale, "named": names, "ratio": ratio, "ratio_named": ratios}
    yield proposal(measured, "attention_scale", _run(measured, scale=fitted), text, parameters, 1)
    text = said("fit.scores_lost")
    parameters = {"scale": 0.0, "expected": scale}
    yield proposal(measured, "attention_scale", _run(measured, scale=0.0), text, parameters)


def _windows(measured: Measured) -> Iterator[Proposal]:
    expected = measured.case.parameters.get("window")
    first = int(measured.case.positions[measured.null.tokens].min()) if bool(measured.null.tokens.any()) else 0
    tried: list[int | None] = [None] if expected is not None else []
    if expected is not None:
        tried += [int(expected) + 1, int(expected) - 1, 2 * int(expected)]
    tried += [first, first + 1, first - 1, _best_window(measured)]
    for window in dict.fromkeys(tried):
        if window == expected or (window is not None and window < 1):
            continue
        sizes = [said("fit.any_window") if one is None else said("fit.number", value=one) for one in (window, expected)]
        text = said("fit.window", window=sizes[0], expected=sizes[1], first=first)
        parameters = {"window": window, "expected": expected, "first_position": first}
        known = expected is not None and window in (None, int(expected) + 1, int(expected) - 1)
        yield proposal(measured, "attention_window", _run(measured, window=window), text, parameters, 0 if known else 1)


def _best_window(measured: Measured) -> int:
    """The window that suits the last wrong row best: sums over the newest keys, of every number of them at once."""
    case = measured.case
    row = int(case.positions.masked_fill(~measured.null.tokens, -1).argmax())
    position = int(case.positions[row])
    keys, values = (case.inputs[name][: position + 1].to(torch.float64).flip(0) for name in "kv")
    groups = case.inputs["q"].shape[1] // keys.shape[1]
    query = case.inputs["q"][row].to(torch.float64).unflatten(0, (keys.shape[1], groups))
    scores = torch.einsum("kgd,skd->kgs", query, keys) * float(case.parameters["scale"])
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    sums = (weights[..., None] * values.transpose(0, 1)[:, None]).cumsum(2) / weights.cumsum(-1)[..., None]
    error = sums.flatten(0, 1) - measured.bad[row][:, None]  # [heads, windows, head_dim]
    return 1 + int(error.square().sum((0, 2)).nan_to_num(nan=torch.inf).argmin())


def _caps(measured: Measured) -> Iterator[Proposal]:
    expected = measured.case.parameters.get("softcap")
    for cap in dict.fromkeys((None, *SOFTCAPS)):
        if cap != expected:
            text = said("fit.no_softcap")
            if cap is not None:
                key = "fit.softcap" if expected is None else "fit.softcap_expected"
                text = said(key, cap=cap, expected=expected)
            parameters = {"softcap": cap, "expected": expected}
            yield proposal(measured, "attention_softcap", _run(measured, softcap=cap), text, parameters)


def _masks(measured: Measured) -> Iterator[Proposal]:
    case = measured.case
    start = int(case.positions.min())
    masks: list[tuple[Said, dict[str, Any]]] = [
        (said("fit.sees_next"), {"ahead": 1}),
        (said("fit.sees_not_own"), {"ahead": -1}),
        (said("fit.sees_all"), {"causal": False}),
        (said("fit.sees_not_first"), {"first": 1}),
    ]
    if start > 0:
        masks.append((said("fit.sees_not_before", start=start), {"first": start}))
        masks.append((said("fit.ends_early", start=start), {"ahead": -start}))
    for words, changed in masks:
        exact = _run(measured, **changed)
        value = torch.where(torch.isnan(exact.value), measured.ref, exact.value)  # a row that sees nothing
        magnitude = exact.magnitude.nan_to_num(nan=1.0)
        yield proposal(measured, "attention_mask", Exact(value, magnitude), words, {"mask": changed})


def _maps(measured: Measured) -> Iterator[Proposal]:
    """Query heads that read the keys of another head."""
    heads, kv = measured.case.inputs["q"].shape[1], measured.case.inputs["k"].shape[1]
    own = torch.arange(heads) // (heads // kv)
    maps = [
        (said("fit.interleaved_heads", kv=kv, group=heads // kv), torch.arange(heads) % kv),
        (said("fit.head_0"), torch.zeros(heads, dtype=torch.int64)),
        (said("fit.next_head"), (own + 1) % kv),
        (said("fit.previous_head"), (own - 1) % kv),
    ]
    for words, mapping in maps:
        if not torch.equal(mapping, own):
            exact = _run(measured, heads=mapping)
            yield proposal(measured, "attention_heads", exact, words, {"key_heads": mapping.tolist()})
    keys, values = measured.case.inputs["k"], measured.case.inputs["v"]
    exact = _run(measured, keys=values, values=keys)
    yield proposal(measured, "arguments_exchanged", exact, said("fit.keys_and_values"), {"formula": "q, v, k"})
