"""What is known of an error that no fit reproduces: where it is, and what that usually means."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

import torch

from align.fits.fit import Fit
from align.fits.measured import LISTED, Measured
from align.fits.noise import beyond
from align.fits.precision import GRIDS
from align.sentences import Said, said

Tensor = torch.Tensor
#: Ranks correlate at least so much where an error grows with the position.
_GROWS = 0.5


def patterns(measured: Measured) -> Iterator[Fit]:
    """Patterns, the most telling first, and always ``unexplained`` at the end."""
    case, null = measured.case, measured.null
    size = _row_errors(measured)
    wrong = null.tokens
    first = int(case.positions[wrong].min()) if bool(wrong.any()) else -1
    window = case.parameters.get("window")
    if window is not None and first == int(window):
        text = said("fit.at_window", first=first, window=window)
        yield _pattern("starts_at_window", text, {"first_position": first, "window": int(window)})
    at_zero = case.positions == 0
    if case.operator == "attention" and bool(at_zero.any()) and not bool(wrong[at_zero].any()) and first > 0:
        later = float(wrong[~at_zero].double().mean())
        text = said("fit.first_right", share=later)
        yield _pattern("right_at_first_position", text, {"first_position": first, "share_of_later": later})
    grows = _correlation(case.positions.double(), size)
    if grows is not None and grows >= _GROWS:
        text = said("fit.grows", correlation=grows, first=first)
        yield _pattern("grows_with_position", text, {"correlation": grows, "first_position": first})
    low = _low_precision(measured)
    if low is not None:
        yield low
    yield _unexplained(measured, size, first)


def _pattern(kind: str, text: Said, parameters: dict[str, Any]) -> Fit:
    return Fit(kind, False, None, None, parameters, 0, text)


def _row_errors(measured: Measured) -> Tensor:
    """Relative error of each row ``[T]``."""
    error = (measured.bad - measured.ref).square().sum((1, 2)).sqrt()
    size = measured.ref.square().sum((1, 2)).sqrt()
    return error / size.clamp_min(float(size.median()) * 0.5 + 1e-300)


def _correlation(positions: Tensor, size: Tensor) -> float | None:
    """Rank correlation; ``None`` for fewer than 8 different positions."""
    if len(positions.unique()) < 8:
        return None
    ranks = [one.argsort().argsort().double() for one in (positions, size)]
    one, two = (rank - rank.mean() for rank in ranks)
    return float((one * two).sum() / (one.norm() * two.norm()).clamp_min(1e-300))


def _low_precision(measured: Measured) -> Fit | None:
    """An error that is random and as large as roundings of a coarser dtype make it."""
    for name, (_, bits) in GRIDS.items():
        ratio = 2.0**-bits / measured.case.unit
        if ratio <= 1:
            continue
        bound = measured.bound * ratio
        error = measured.bad - measured.ref
        typical = float((error / bound)[measured.finite].square().mean().sqrt())
        if typical >= 0.05 and not beyond(error, bound, measured.ref, measured.limits).any:
            text = said("fit.low_precision", dtype=name)
            return _pattern("low_precision", text, {"dtype": name, "of_its_bound": typical})
    return None


def _unexplained(measured: Measured, size: Tensor, first: int) -> Fit:
    null, case = measured.null, measured.case
    share = float(null.elements[measured.finite].double().mean())
    T, H, D = measured.shape
    counts = {"tokens": (null.tokens, T), "heads": (null.heads, H), "channels": (null.channels, H * D)}
    parameters: dict[str, Any] = {
        "share_beyond": share,
        "relative_l2": _relative(measured),
        "first_position": first,
        "worst_position": int(case.positions[int(size.argmax())]),
    }
    words = []
    for name, (mask, every) in counts.items():
        count = int(mask.sum())
        parameters[f"{name}_total"], parameters[name] = count, measured.indices(name)
        if every > 1 and count < every:
            more = " …" if count > 6 else ""
            words.append(said("fit.some", count=count, of=every, what=name, listed=parameters[name][:6], more=more))
    if case.requests:
        rows = torch.nonzero(null.tokens).flatten().tolist()
        parameters["requests"] = sorted({case.requests[row] for row in rows})[:LISTED]
    where = said("fit.only", parts=words) if words else ""
    relative = parameters["relative_l2"]
    text = said("fit.unexplained", share=share, relative=relative, where=where, first=first)
    return _pattern("unexplained", text, parameters)


def _relative(measured: Measured) -> float:
    size = float(measured.ref.square().sum())
    return sqrt(float((measured.bad - measured.ref).square().sum()) / size) if size > 0 else float("inf")
