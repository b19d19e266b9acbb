"""Findings of conditions: an engine computes otherwise than its checkpoint's configuration says.

Nobody asked it to, so that stopping would hide what is wrong: a norm's epsilon, rope frequencies, a scale of attention
(design §5: a live configuration that differs from the checkpoint is a finding, never a reason to stop).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from align import sentences
from align.checkpoints.table import Structure, kinds, parse
from align.conditions.table import TABLE
from align.conditions.types import Condition
from align.findings import Finding
from align.findings import told as in_words

_LAYER = re.compile(r"layers\.(\d+)\.")
#: What a norm's module is called → its checkpoint.
_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "q_norm": "attn.q_norm",
    "k_norm": "attn.k_norm",
}
#: The same of models with norms before and behind each block.
_SANDWICH = {
    **_NORMS,
    "post_attention_layernorm": "attn.post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp.post_norm",
}


class Accusing(Protocol):
    """What a finding has, while a run works and in its result."""

    @property
    def kind(self) -> str: ...
    @property
    def side(self) -> str | None: ...
    @property
    def checkpoint(self) -> str | None: ...


def configuration_findings(conditions: Iterable[Condition], structure: Structure | None = None) -> list[Finding]:
    """One finding for each side and operator, with all that says so; the structure tells what norms are called."""
    norms = _norms(structure)
    told = {row.name: row.told for row in TABLE if row.told is not None}
    groups: dict[tuple[str, tuple[str, str]], list[Condition]] = {}
    for condition in conditions:
        if condition.told:
            for side in condition.sides:
                groups.setdefault((side, told[condition.name]), []).append(condition)
    return [_finding(side, told[group[0].name], group, norms) for (side, _), group in groups.items()]


def _finding(side: str, place: tuple[str, str], group: Sequence[Condition], norms: Mapping[str, str]) -> Finding:
    path = next(row.told[0] for row in TABLE if row.told == place)
    said = [
        {
            "condition": one.name,
            "requested": one.requested,
            "observed": one.observed[side],
            "where": one.where[side],
            "why": one.why,
        }
        for one in group
    ]
    places = tuple(dict.fromkeys(name for one in group for name in one.places.get(side, ())))
    checkpoint = _checkpoint_of(places, place[1], norms)
    what = sentences.said(
        "configuration.what",
        names=[one.name for one in group],
        where=sentences.said("configuration.where", places=places[:3], more=" …" if len(places) > 3 else "")
        if places
        else "",
        whys=[one.why_told or sentences.raw(one.why) for one in group],
    )
    return Finding(
        path,
        "configuration",
        side=side,
        checkpoint=checkpoint,
        layer=parse(checkpoint).layer,
        evidence={**in_words(what), "conditions": said, "places": list(places)},
        next=f"read how that engine sets the {group[-1].where[side]} from the configuration, "
        "and recompute the checkpoint with transformers: align golden RUN",
    )


def _checkpoint_of(places: Sequence[str], kind: str, norms: Mapping[str, str]) -> str:
    """The checkpoint of the first module that is wrong; the first layer's, if all modules are."""
    if not places:
        return kinds()[kind].at(0)
    found = _LAYER.search(places[0])
    tail = next((norms[part] for part in reversed(places[0].split(".")) if part in norms), kind)
    if found is None:  # behind the last layer
        return "final_norm"
    return kinds()[tail if kind == "attn_norm" else kind].at(int(found[1]))


def with_configuration(
    findings: Sequence[Finding], conditions: Iterable[Condition], structure: Structure | None = None
) -> tuple[Finding, ...]:
    """All findings: that of a configuration behind the first one of an operator that it explains, else in front."""
    found = list(findings)
    for one in configuration_findings(conditions, structure):
        place = next((at + 1 for at, other in enumerate(found) if explains(one.checkpoint, one.side, other)), None)
        if place is None:
            place = sum(other.path == "INPUT" for other in found)
        found.insert(place, one)
    return tuple(found)


def checkpoint_of(condition: str, places: Sequence[str], structure: Structure | None = None) -> str | None:
    """The checkpoint of the first module that does not meet a condition; ``None`` of one that is about no operator."""
    kind = next((row.told[1] for row in TABLE if row.name == condition and row.told is not None), None)
    return None if kind is None else _checkpoint_of(places, kind, _norms(structure))


def explains(checkpoint: str | None, side: str | None, other: Accusing) -> bool:
    """Whether an operator's finding is of the kind of operator to which a checkpoint belongs, on the same side."""
    if other.kind != "operator" or other.side != side or checkpoint is None or other.checkpoint is None:
        return False
    try:
        mine, its = parse(checkpoint).kind, parse(other.checkpoint).kind
    except ValueError:
        return False
    return mine.operators[0] == its.operators[0]


def _norms(structure: Structure | None) -> Mapping[str, str]:
    return _SANDWICH if structure is not None and "sandwich" in structure.tags else _NORMS
