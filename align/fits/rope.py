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
from align.fits.spectrum import (
    best_positions,
    fit_base,
    fit_stretch,
    frequency_errors,
    part_of_a_position,
    phases,
)
from align.sentences import Said, said

Tensor = torch.Tensor
#: Bases of published configurations.
BASES = (1e4, 1e6, 5e5, 1e5, 5e6, 1e7, 8e6, 1.5e5, 5e4, 2e4, 4e4)
#: One position has an angle for any frequency; more of them tell whether it grows evenly.
_FEWEST = 3
#: Part of a position that is told; less is a matter of rounding.
_LEAST = 1e-3
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
    about = {"value": float(changed[worst]), "expected": float(rotation.inverse[worst])}
    text = said("fit.rope_frequencies", index=worst, **about)
    ratios = (changed / rotation.inverse)[:LISTED].tolist()
    other = replace(rotation, inverse=changed)
    return _made(measured, "rope_frequencies", other, x, text, {"ratios": ratios}, len(errors))


def _made(
    measured: Measured,
    kind: str,
    rotation: Rotation,
    x: Tensor,
    text: Said,
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
    names = {True: said("fit.pairs"), False: said("fit.halves")}
    other = replace(rotation, interleaved=not rotation.interleaved)
    text = said("fit.rope_pairing", found=names[other.interleaved], expected=names[rotation.interleaved])
    yield _made(measured, "rope_pairing", other, x, text, {"interleaved": other.interleaved})
    words = said("fit.rope_sign")
    yield _made(measured, "rope_direction", replace(rotation, inverse=-rotation.inverse), x, words, {})
    once = rotation.apply(x, measured.case.positions)
    yield _made(measured, "rope_twice", rotation, once, said("fit.rope_twice"), {})
    plain = replace(rotation, inverse=torch.zeros_like(rotation.inverse), factor=1.0)
    yield _made(measured, "rope_missing", plain, x, said("fit.rope_missing"), {})


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
                text = said("fit.rope_precision", what=what, dtype=name)
                yield _made(measured, "rope_precision", rotation, x, text, {"dtype": name, "of": what}, 0, angles)
        angles = rotation.angles(measured.case.positions)
        turn = torch.complex(low(angles.cos() * rotation.factor), low(angles.sin() * rotation.factor))
        value = rotation.joined(rotation.pairs(x) * turn[:, None], x)
        magnitude = rotation.magnitude(x, angles, rotation.factor, getattr(torch, measured.case.dtype))
        text = said("fit.rope_table", dtype=name)
        parameters = {"dtype": name, "of": "cos and sin"}
        yield proposal(measured, "rope_precision", Exact(value, magnitude), text, parameters)


def _scalings(measured: Measured, rotation: Rotation, x: Tensor) -> Iterator[Proposal]:
    """The configuration's scaling ignored, whole or in part."""
    case = measured.case
    rope = dict(case.parameters["rope"])
    size = case.bad.shape[-1]
    variants: list[tuple[Said, dict[str, Any]]] = []
    kind = rope.get("rope_type", "default")
    if kind != "default":
        variants.append((said("fit.scaling_ignored", type=kind), {**rope, "rope_type": "default"}))
        for other in ("linear", "dynamic", "llama3", "yarn"):
            if other != kind:
                variants.append((said("fit.scaling_type", type=other, expected=kind), {**rope, "rope_type": other}))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        variants.append((said("fit.all_rotated"), {**rope, "partial_rotary_factor": 1.0}))
    for words, changed in variants:
        other_rotation = Rotation.of({**case.parameters, "rope": changed}, size, case.positions)
        if other_rotation is not None:
            parameters = {"rope": {key: value for key, value in changed.items() if not isinstance(value, (list, dict))}}
            yield _made(measured, "rope_scaling", other_rotation, x, words, parameters)
    if rotation.factor != 1.0:
        missing = said("fit.rope_factor", factor=rotation.factor)
        yield _made(measured, "rope_scaling", replace(rotation, factor=1.0), x, missing, {"factor": 1.0})


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
        text = said("fit.rope_base", base=base, expected=expected)
        changed = replace(rotation, inverse=inverse)
        yield _made(measured, "rope_base", changed, x, text, {"base": base, "expected": expected}, free)


def _stretches(measured: Measured, rotation: Rotation, x: Tensor, seen: Tensor) -> Iterator[Proposal]:
    """All angles too large or too small by one factor: linear scaling missing or applied."""
    fitted = fit_stretch(seen, measured.case.positions, rotation.inverse, STRETCHES)
    one = [] if len(measured.case.positions.unique()) == 1 else [(fitted, 1)]  # at one position that is another one
    for factor, free in (*((known, 0) for known in STRETCHES), *one):
        text = said("fit.rope_not_stretched" if factor > 1 else "fit.rope_stretched", factor=factor)
        changed = replace(rotation, inverse=rotation.inverse * factor)
        yield _made(measured, "rope_stretch", changed, x, text, {"factor": factor}, free)


def _positions(measured: Measured, rotation: Rotation, x: Tensor, seen: Tensor) -> Iterator[Proposal]:
    """Other positions: moved by a constant, whole or in part, ended at the table's length, or each its own."""
    case = measured.case
    positions = case.positions
    wrong = measured.null.tokens
    if not bool(wrong.any()):
        return
    used = best_positions(seen, positions, rotation.inverse)
    moved = (used - positions)[wrong]
    shift = int(moved.mode().values)
    end = int(used[wrong].mode().values)
    tried: list[tuple[Said, Tensor, dict[str, Any], int]] = []
    if shift:
        tried.append((said("fit.positions_moved", shift=shift), positions + shift, {"offset": shift}, 1))
    elif abs(part := part_of_a_position(seen[wrong], rotation.inverse)) > _LEAST:
        moved_by_part = torch.where(wrong, positions + part, positions.to(WIDE))
        tried.append((said("fit.positions_part", part=part), moved_by_part, {"offset": part}, 1))
    if end < int(positions.max()):
        words = said("fit.positions_end", end=end)
        tried.append((words, positions.clamp_max(end), {"end": end}, 1))
    own = torch.where(wrong, used, positions)
    pairs = torch.stack((positions[wrong], used[wrong]), 1)[:LISTED].tolist()
    listed = [said("fit.position_at", used=one, at=at) for at, one in pairs[:6]]
    more = " …" if len(pairs) > 6 else ""
    many = said("fit.positions_other", count=int(wrong.sum()), listed=listed, more=more)
    tried.append((many, own, {"positions": pairs}, int(wrong.sum())))
    for words, given, parameters, free in tried:
        angles = given.to(WIDE)[:, None] * rotation.inverse[None, :]
        yield _made(measured, "rope_positions", rotation, x, words, parameters, free, angles)
