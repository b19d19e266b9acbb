"""Rotary embedding: from the angle by which each pair is turned too far to base, scaling, position and precision.

``bad`` and ``ref`` are the same pairs turned by different angles, so their difference in angle needs no input: the
embedding can be undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from align.checkpoints.recompute import Exact
from align.fits.fit import Proposal
from align.fits.measured import LISTED, Measured
from align.fits.operators import proposal
from align.fits.rotation import WIDE, Rotation
from align.fits.spectrum import best_positions, fit_base, fit_stretch, frequency_errors, phases

Tensor = torch.Tensor
#: Bases of published configurations.
BASES = (1e4, 1e6, 5e5, 1e5, 5e6, 1e7, 8e6, 1.5e5, 5e4, 2e4, 4e4)
#: One position has an angle for any frequency; more of them tell whether it grows evenly.
_FEWEST = 3
#: Factors of linear scaling.
STRETCHES = (2.0, 4.0, 8.0, 16.0, 32.0, 3.0, 0.5, 0.25, 0.125, 1 / 16, 1 / 32, 1 / 3)


def propose(measured: Measured) -> Iterator[Proposal]:
    """Nothing fitted first: pairing, direction, precision, missing scaling. Then what the angles say."""
    case = measured.case
    if case.bad.dim() != 3:
        return
    rotation = Rotation.of(case.parameters, case.bad.shape[-1], case.positions)
    if rotation is None:
        return
    x = case.inputs["x"].to(WIDE) if case.has("x") else rotation.undo(measured.ref, case.positions)
    yield from _forms(measured, rotation, x)
    yield from _precisions(measured, rotation, x)
    yield from _scalings(measured, rotation, x)
    seen = phases(rotation.pairs(measured.bad), rotation.pairs(measured.ref))
    yield from _bases(measured, rotation, x, seen)
    yield from _stretches(measured, rotation, x, seen)
    yield from _positions(measured, rotation, x, seen)
    if len(case.positions.unique()) > _FEWEST:
        yield _frequencies(measured, rotation, x, seen)


def _frequencies(measured: Measured, rotation: Rotation, x: Tensor, seen: Tensor) -> Proposal:
    """Each frequency its own."""
    errors = frequency_errors(seen, measured.case.positions)
    changed = rotation.inverse + errors
    worst = int((errors.abs() / rotation.inverse).argmax())
    text = (
        f"the angles grow with the position at other frequencies; frequency {worst} is {float(changed[worst]):.5g} "
        f"instead of {float(rotation.inverse[worst]):.5g}"
    )
    ratios = (changed / rotation.inverse)[:LISTED].tolist()
    other = replace(rotation, inverse=changed)
    return _made(measured, "rope_frequencies", other, x, text, {"ratios": ratios}, len(errors))


def _made(
    measured: Measured,
    kind: str,
    rotation: Rotation,
    x: Tensor,
    text: str,
    parameters: Mapping[str, Any],
    free: int = 0,
    angles: Tensor | None = None,
) -> Proposal:
    """The embedding of ``x`` by other frequencies or by other ``angles`` ``[T, rotated / 2]``."""
    turns = rotation.angles(measured.case.positions) if angles is None else angles
    value = rotation.turned(x, turns, rotation.factor)
    magnitude = rotation.magnitude(x, turns, rotation.factor, getattr(torch, measured.case.dtype))
    return proposal(measured, kind, Exact(value, magnitude), text, parameters, free)


def _forms(measured: Measured, rotation: Rotation, x: Tensor) -> Iterator[Proposal]:
    names = {True: "interleaved pairs (gptj)", False: "halves (neox)"}
    other = replace(rotation, interleaved=not rotation.interleaved)
    text = f"pairs are {names[other.interleaved]}, {names[rotation.interleaved]} are expected"
    yield _made(measured, "rope_pairing", other, x, text, {"interleaved": other.interleaved})
    words = "the angles have the wrong sign"
    yield _made(measured, "rope_direction", replace(rotation, inverse=-rotation.inverse), x, words, {})
    once = rotation.apply(x, measured.case.positions)
    yield _made(measured, "rope_twice", rotation, once, "it is applied twice", {})
    plain = replace(rotation, inverse=torch.zeros_like(rotation.inverse), factor=1.0)
    yield _made(measured, "rope_missing", plain, x, "it is not applied", {})


def _precisions(measured: Measured, rotation: Rotation, x: Tensor) -> Iterator[Proposal]:
    """Angles, or what they are made of, rounded to 8 or 11 bits."""
    positions, inverse = measured.case.positions.to(WIDE)[:, None], rotation.inverse[None, :]
    for name in ("bfloat16", "float16"):
        dtype = getattr(torch, name)

        def low(number: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return number.to(torch.float32).to(dtype).to(WIDE)

        made = {
            "frequencies": positions * low(inverse),
            "positions": low(positions) * inverse,
            "angles": low(positions * inverse),
            "positions and frequencies": low(positions) * low(inverse),
            "positions, frequencies and angles": low(low(positions) * low(inverse)),
        }
        for what, angles in made.items():
            if bool(torch.isfinite(angles).all()):
                text = f"{what} are rounded to {name} before cos and sin; the error grows with the position"
                yield _made(measured, "rope_precision", rotation, x, text, {"dtype": name, "of": what}, 0, angles)
        angles = rotation.angles(measured.case.positions)
        turn = torch.complex(low(angles.cos() * rotation.factor), low(angles.sin() * rotation.factor))
        value = rotation.joined(rotation.pairs(x) * turn[:, None], x)
        magnitude = rotation.magnitude(x, angles, rotation.factor, getattr(torch, measured.case.dtype))
        text = f"cos and sin are rounded to {name}"
        parameters = {"dtype": name, "of": "cos and sin"}
        yield proposal(measured, "rope_precision", Exact(value, magnitude), text, parameters)


def _scalings(measured: Measured, rotation: Rotation, x: Tensor) -> Iterator[Proposal]:
    """The configuration's scaling ignored, whole or in part."""
    case = measured.case
    rope = dict(case.parameters["rope"])
    size = case.bad.shape[-1]
    variants: dict[str, dict[str, Any]] = {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        variants[f"the scaling of type {kind} is ignored"] = {**rope, "rope_type": "default"}
        for other in ("linear", "dynamic", "llama3", "yarn"):
            if other != kind:
                variants[f"scaling of type {other} instead of {kind}"] = {**rope, "rope_type": other}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        variants["all channels are rotated"] = {**rope, "partial_rotary_factor": 1.0}
    for words, changed in variants.items():
        other_rotation = Rotation.of({**case.parameters, "rope": changed}, size, case.positions)
        if other_rotation is not None:
            parameters = {"rope": {key: value for key, value in changed.items() if not isinstance(value, (list, dict))}}
            yield _made(measured, "rope_scaling", other_rotation, x, words, parameters)
    if rotation.factor != 1.0:
        words = f"the factor {rotation.factor:.5g} on cos and sin is missing"
        yield _made(measured, "rope_scaling", replace(rotation, factor=1.0), x, words, {"factor": 1.0})


def _bases(measured: Measured, rotation: Rotation, x: Tensor, seen: Tensor) -> Iterator[Proposal]:
    """Another base; published ones need no fit."""
    expected = float(measured.case.parameters["rope"]["rope_theta"])
    exponents = torch.arange(len(rotation.inverse), dtype=WIDE) / len(rotation.inverse)
    fitted = fit_base(seen, measured.case.positions, rotation.inverse, expected, BASES)
    for base, free in (*((known, 0) for known in BASES), (fitted, 1)):
        if abs(base / expected - 1) < 1e-9:
            continue
        # A scaled embedding stays scaled: only the base changes.
        inverse = rotation.inverse * (expected / base) ** exponents
        text = f"the base is {base:.6g} instead of {expected:.6g}"
        changed = replace(rotation, inverse=inverse)
        yield _made(measured, "rope_base", changed, x, text, {"base": base, "expected": expected}, free)


def _stretches(measured: Measured, rotation: Rotation, x: Tensor, seen: Tensor) -> Iterator[Proposal]:
    """All angles too large or too small by one factor: linear scaling missing or applied."""
    fitted = fit_stretch(seen, measured.case.positions, rotation.inverse, STRETCHES)
    one = [] if len(measured.case.positions.unique()) == 1 else [(fitted, 1)]  # at one position that is another one
    for factor, free in (*((known, 0) for known in STRETCHES), *one):
        text = f"all angles are {factor:.5g} times what is expected: linear scaling is " + (
            "missing" if factor > 1 else "applied"
        )
        changed = replace(rotation, inverse=rotation.inverse * factor)
        yield _made(measured, "rope_stretch", changed, x, text, {"factor": factor}, free)


def _positions(measured: Measured, rotation: Rotation, x: Tensor, seen: Tensor) -> Iterator[Proposal]:
    """Other positions: moved by a constant, ended at the table's length, or each its own."""
    case = measured.case
    positions = case.positions
    wrong = measured.null.tokens
    if not bool(wrong.any()):
        return
    used = best_positions(seen, positions, rotation.inverse)
    moved = (used - positions)[wrong]
    shift = int(moved.mode().values)
    end = int(used[wrong].mode().values)
    tried: list[tuple[str, Tensor, dict[str, Any], int]] = []
    if shift:
        tried.append((f"positions are moved by {shift:+d}", positions + shift, {"offset": shift}, 1))
    if end < int(positions.max()):
        words = f"positions end at {end}: the table of cos and sin is shorter than the sequence"
        tried.append((words, positions.clamp_max(end), {"end": end}, 1))
    own = torch.where(wrong, used, positions)
    pairs = torch.stack((positions[wrong], used[wrong]), 1)[:LISTED].tolist()
    listed = ", ".join(f"{one} at {at}" for at, one in pairs[:6])
    many = f"{int(wrong.sum())} rows have other positions: {listed}" + (" …" if len(pairs) > 6 else "")
    tried.append((many, own, {"positions": pairs}, int(wrong.sum())))
    for words, given, parameters, free in tried:
        angles = given.to(WIDE)[:, None] * rotation.inverse[None, :]
        yield _made(measured, "rope_positions", rotation, x, words, parameters, free, angles)
