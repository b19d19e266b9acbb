"""What is wrong with an accused checkpoint: which side's operator errs against float64, where, and in which way.

The oracle recomputes it on both sides from what each recorded; what the guilty one recorded is then explained by fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from align.checkpoints.bounds import bounds, unit_roundoff
from align.checkpoints.table import Name, parse
from align.compare.rows import Recorded, real_steps
from align.fits import INPUTS, Fit, FitCase, explain
from align.fits.table import kinds as fault_kinds
from align.oracle.oracle import Oracle
from align.oracle.types import NotObservableError, OracleResult
from align.sentences import Said, raw, said, text_of
from align.trace.format import StepEntry

Tensor = torch.Tensor
Key = tuple[str, int]
#: Rows and elements of one checkpoint that fits look at; more would take minutes and tell the same.
MAX_ROWS, MAX_ELEMENTS = 2048, 1 << 22
#: Channels, heads and tokens that are listed.
LISTED = 64


@dataclass(frozen=True)
class Diagnosis:
    """An accused checkpoint.

    Attributes:
        checkpoint: its name.
        operator: that makes it.
        side: whose operator errs; ``None`` if both, neither, or it is not observable.
        told: how that is known.
        sides: by role, what the oracle says.
        fits: kinds of faults that reproduce the error, the simplest first; patterns if nothing does.
        channels, heads: flat canonical channels and heads that are beyond their bound, worst first.
        channels_total: how many channels are, of ``channels_of``; that is ``None`` if channels were not measured.
    """

    checkpoint: str
    operator: str
    side: str | None
    told: Said
    sides: Mapping[str, OracleResult] = field(default_factory=dict)
    fits: tuple[Fit, ...] = ()
    channels: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    channels_total: int = 0
    channels_of: int | None = None

    @property
    def why(self) -> str:
        """``told``, in English."""
        return text_of(self.told)

    @property
    def kind(self) -> str | None:
        """The first fit's kind, if it explains the error."""
        return self.fits[0].kind if self.fits and self.fits[0].explains else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        table = fault_kinds()
        return {
            "checkpoint": self.checkpoint,
            "operator": self.operator,
            "side": self.side,
            "why": self.why,
            "told": self.told,
            "kind": self.kind,
            "sides": {role: one.to_dict() for role, one in self.sides.items()},
            "fits": [
                {**fit.to_dict(), "sentence": {"en": table[fit.kind].en, "zh": table[fit.kind].zh}} for fit in self.fits
            ],
            "channels": list(self.channels),
            "channels_total": self.channels_total,
            "channels_of": self.channels_of,
            "heads": list(self.heads),
        }


def diagnose(name: str, side: str | None, traces: Mapping[str, Recorded]) -> Diagnosis:
    """Recompute a checkpoint on both sides, and explain the error of the one that is wrong.

    Args:
        side: who is accused; ``None``: whoever errs.
        traces: by role, with the values of the checkpoint and of its inputs.

    Raises:
        UserError: the checkpoint's files are not those of the recording.
        ValueError: a trace does not say what model it is of.
    """
    with ExitStack() as stack:
        oracles = {role: stack.enter_context(Oracle(trace)) for role, trace in traces.items()}
        sides = {role: oracle.judge([name])[0] for role, oracle in oracles.items()}
        beyond = [role for role, one in sides.items() if one.verdict == "beyond"]
        operator = next(iter(sides.values())).operator
        guilty, why = _guilty(side, beyond, sides)
        if guilty is None:
            return Diagnosis(name, operator, None, why, sides)
        fits = _fits(name, operator, guilty, oracles[guilty], traces) if len(beyond) > 0 else ()
        channels, total = _members(sides[guilty], "channels")
        heads, _ = _members(sides[guilty], "heads")
        profile = sides[guilty].channels
        return Diagnosis(
            name, operator, guilty, why, sides, fits, channels, heads, total,
            channels_of=None if profile is None else len(profile.ratio),
        )  # fmt: skip


def _guilty(side: str | None, beyond: list[str], sides: Mapping[str, OracleResult]) -> tuple[str | None, Said]:
    if len(beyond) == 1:
        (guilty,) = beyond
        (other,) = (role for role in sides if role != guilty)
        state = sides[other].verdict
        told = said("oracle.other_within" if state == "within" else "oracle.other_hidden")
        return guilty, said("oracle.one", side=guilty, other=told)
    if len(beyond) == len(sides):
        return side, said("oracle.both")
    unseen = {role: one.why for role, one in sides.items() if one.verdict == "not observable"}
    if unseen:
        parts = [said("oracle.hidden", side=role, why=raw(why)) for role, why in unseen.items()]
        return None, said("list.semicolon", parts=parts)
    return None, said("oracle.neither")


def _members(result: OracleResult, which: str) -> tuple[tuple[int, ...], int]:
    """Members of a profile whose elements are beyond their bounds, worst first, and how many."""
    profile = getattr(result, which)
    if profile is None:
        return (), 0
    wrong = (profile.ratio > 1.0).nonzero()[:, 0].tolist()
    if not wrong and result.residual is not None:  # below every single bound: the gain tells
        worst = result.residual.gain_channel if which == "channels" else result.residual.gain_head
        wrong = [] if worst is None or abs(worst.value) <= worst.allowed else [worst.index]
    ordered = sorted(wrong, key=lambda index: -float(profile.ratio[index]))
    return tuple(ordered[:LISTED]), len(ordered)


# ------------------------------------------------------------------------------------------------------------- fits


def _fits(name: str, operator: str, guilty: str, oracle: Oracle, traces: Mapping[str, Recorded]) -> tuple[Fit, ...]:
    trace, parsed = traces[guilty], parse(name)
    rows = _Rows.of(trace, parsed, oracle, operator)
    if rows is None:
        return ()
    try:
        case = FitCase(
            name=name,
            operator=operator,
            bad=rows.bad,
            ref=rows.ref,
            noise=rows.magnitude * (bounds()[operator].max_roundings * unit_roundoff(trace.dtype)),
            positions=torch.tensor([position for _, position in rows.keys]),
            dtype=trace.dtype,
            requests=tuple(request for request, _ in rows.keys),
            inputs=_inputs(operator, parsed, trace, oracle, rows),
            parameters=_parameters(trace, oracle),
            others=_others(parsed, oracle, trace, rows),
        )
    except (ValueError, NotObservableError):  # shapes that fits do not know
        return ()
    return explain(case)


@dataclass(frozen=True)
class _Rows:
    """Rows of all steps: recorded, exact, and the magnitudes; only those that are known."""

    keys: list[Key]
    bad: Tensor
    ref: Tensor
    magnitude: Tensor

    @classmethod
    def of(cls, trace: Recorded, name: Name, oracle: Oracle, operator: str) -> _Rows | None:
        if operator not in bounds() or operator == "topk_ids":
            return None
        keys: list[Key] = []
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for entry, recorded in _recorded(trace, str(name)):
            try:
                exact = oracle.recompute(str(name), entry.step)
            except NotObservableError:
                continue
            own = _keys(entry, name)
            known = exact.magnitude.flatten(1).isfinite().all(1)
            parts.append((recorded[known], exact.value[known], exact.magnitude[known]))
            keys += [key for key, good in zip(own, known.tolist(), strict=True) if good]
        if not keys:
            return None
        bad, ref, magnitude = (torch.cat(column) for column in zip(*parts, strict=True))
        if operator == "attention":  # fits look at one request's history: of the one that is worst
            error = (bad.double() - ref).abs()
            ratio = (error / magnitude).masked_fill(error == 0, 0.0).nan_to_num(nan=torch.inf)
            worst = int(ratio.flatten(1).amax(1).argmax())
            mine = [index for index, (request, _) in enumerate(keys) if request == keys[worst][0]]
            keys = [keys[index] for index in mine]
            bad, ref, magnitude = bad[mine], ref[mine], magnitude[mine]
        most = min(MAX_ROWS, max(1, MAX_ELEMENTS // max(1, bad[0].numel())))
        return cls(keys[:most], bad[:most].double(), ref[:most].double(), magnitude[:most].double())


def _keys(entry: StepEntry, name: Name) -> list[Key]:
    if name.kind.axes[0] == "requests":
        return list(entry.logits_rows)
    return [(span.request, position) for span in entry.rows for position in range(span.start, span.start + span.count)]


def _recorded(trace: Recorded, name: str) -> Iterator[tuple[StepEntry, Tensor]]:
    """Steps in which a checkpoint's values were recorded, with the values of all ranks."""
    for entry in real_steps(trace):
        try:
            values = trace.joined(entry.step, name)
        except ValueError:
            continue
        if values is not None and len(values) == len(_keys(entry, parse(name))):
            yield entry, values


def _by_key(trace: Recorded, name: Name) -> dict[Key, Tensor]:
    return {
        key: row
        for entry, values in _recorded(trace, str(name))
        for key, row in zip(_keys(entry, name), values, strict=True)
    }


def _at(trace: Recorded, name: Name, keys: list[Key]) -> Tensor | None:
    """The rows of a checkpoint, ``[T, *channels]``; ``None`` if one is not there."""
    found = _by_key(trace, name)
    return torch.stack([found[key] for key in keys]) if all(key in found for key in keys) else None


def _inputs(operator: str, name: Name, trace: Recorded, oracle: Oracle, rows: _Rows) -> dict[str, Tensor]:
    """What the operator read, by the names of :data:`align.fits.INPUTS`; what is not known is left out."""
    names = INPUTS.get(operator, ())
    sources = oracle.structure.inputs(name)
    found: dict[str, Tensor] = {}
    if operator == "attention":
        request = rows.keys[0][0]
        for called, source in zip(("q", "k", "v"), sources, strict=False):
            every = _by_key(trace, source)
            last = max(position for _, position in rows.keys)
            keys = rows.keys if called == "q" else [(request, position) for position in range(last + 1)]
            if all(key in every for key in keys):
                found[called] = torch.stack([every[key] for key in keys])
        return found if len(found) == len(sources) else {}
    for called, source in zip((one for one in names if one not in ("weight", "bias?")), sources, strict=False):
        value = _at(trace, source, rows.keys)
        if value is not None:
            found[called] = value.flatten(1) if operator == "linear" else value
    if "weight" in names and oracle.weights is not None:
        weight = oracle.weights.name(name.kind.name, name.layer)
        if weight is not None:
            read = oracle.weights.read(weight)
            offset = oracle.facts.norm_offset if operator == "rms_norm" else 0.0
            found["weight"] = read.double() + offset if offset else read
        bias = oracle.weights.name(name.kind.name, name.layer, bias=True)
        if bias is not None and "bias?" in names:
            found["bias"] = oracle.weights.read(bias)
    return found


def _parameters(trace: Recorded, oracle: Oracle) -> dict[str, Any]:
    structure, facts = oracle.structure, oracle.facts
    lengths = [int(one["prompt_len"]) for one in trace.manifest.get("requests", ())]
    return {
        "eps": structure.eps,
        "rope": dict(structure.rope),
        "interleaved": facts.interleaved,
        "seq_len": max(lengths, default=0),
        "scale": facts.scale,
        "window": structure.window,
        "softcap": facts.softcap,
        "head_dim": structure.head_dim,
        "hidden": structure.hidden,
        "kv_heads": structure.kv_heads,
        "tp": structure.tp,
        "layers": structure.layers,
        "activation": facts.activation,
    }


def _others(name: Name, oracle: Oracle, trace: Recorded, rows: _Rows) -> dict[str, Tensor]:
    """What the result may have been exchanged with: its layer's other checkpoints as they should be on this side.

    What is computed from the accused one is left out: it would be right by construction.
    """
    structure = oracle.structure
    shape = rows.bad.shape[1:]
    found: dict[str, Tensor] = {}
    for one in structure.names():
        if one.layer != name.layer or one.kind.integer or one.order == name.order:
            continue
        if tuple(structure.size(axis) for axis in one.kind.axes[1:]) != tuple(shape) or structure.behind(one, name):
            continue
        exact: dict[Key, Tensor] = {}
        for entry in real_steps(trace):
            try:
                value = oracle.recompute(str(one), entry.step).value
            except NotObservableError:
                continue
            exact.update(zip(_keys(entry, one), value, strict=False))
        if all(key in exact for key in rows.keys):
            found[str(one)] = torch.stack([exact[key] for key in rows.keys])
    return found
