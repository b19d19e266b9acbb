"""The live parameters of one rank in canonical parts, and their audit against the checkpoint's files.

The audit is exact: every row of every parameter, de-fused, equals the rank's share of the checkpoint's tensor after the
conversion to the model's dtype, which both engines do on loading.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from align.checkpoints.packed import PackedExpert, unpacked
from align.checkpoints.parameters import FUSED, LivePlace, Parameter, parameters, ranks_sharing, rows_of
from align.checkpoints.shards import split
from align.checkpoints.table import Structure, kinds

EQUAL, DIFFERS, NOT_OBSERVABLE = "equal", "differs", "not observable"
#: ``why`` of an expert that differs, before the tensor's name: a loader may have looked for it under its own.
PACKED = "the checkpoint holds the experts of this layer in one tensor,"
#: Tensor that a tied head shares.
_EMBEDDING = "model.embed_tokens.weight"
#: Rows of a difference that are listed.
_LISTED = 8
#: Elements of a tensor whose rows are sorted to see whether they are exchanged.
_SORTED = 1 << 26
#: Engines that keep ``1 + weight``, rounded to the file's dtype, where a model's norms multiply with that
#: (lmdeploy 0.12.2, models/gemma.py); others keep the weight and add to it at each call.
_ADDS_ON_LOADING = ("lmdeploy",)


@dataclass(frozen=True)
class Audited:
    """One tensor of the checkpoint against the live parameter that holds it.

    Attributes:
        parameter: name of the checkpoint's tensor.
        status: ``equal``, ``differs`` or ``not observable``.
        kind: the semantic point that its operator produces; ``""`` for a parameter that no rule knows.
        layer: ``None`` for what exists once.
        live: the engine's parameter, with its part if it is fused.
        rank: whose share was looked at.
        rows: first differing rows of the checkpoint's tensor (elements of a vector).
        rows_total: how many differ.
        max_abs: largest difference.
        why: reason of ``not observable``, or what is remarkable.
        holds: what a parameter that differs holds instead, if that is something known: another tensor of the
            checkpoint, another rank's share, other heads, its own rows in another order, zeros.
        heads: of a parameter of heads that differs: the checkpoint's heads that it holds, if each is one.
        heads_due: the heads that this rank should hold.
        expert_held: of an expert's parameter that differs under expert parallelism: the expert that it is of.
    """

    parameter: str
    status: str
    kind: str
    layer: int | None
    live: str
    rank: int
    rows: tuple[int, ...] = ()
    rows_total: int = 0
    max_abs: float = 0.0
    why: str = ""
    holds: str = ""
    heads: tuple[int, ...] = ()
    heads_due: tuple[int, ...] = ()
    expert_held: int | None = None


class LiveWeights:
    """The parameters of a live model.

    Args:
        model: root of the causal language model.
        rank: global rank, by which experts are shared; of all else ``tp_rank`` decides the share.
        engine: whose loader filled it, see :data:`_ADDS_ON_LOADING`.

    Attributes:
        norm_offset: what is added to the weight of a norm, as it lives, before it multiplies.
    """

    def __init__(self, model: torch.nn.Module, structure: Structure, rank: int, tp_rank: int, engine: str = "") -> None:
        self._structure, self._rank, self._tp_rank = structure, rank, tp_rank
        #: What the engine has added to the weights of norms, and what its kernels still add.
        self._added = structure.norm_offset if engine in _ADDS_ON_LOADING else 0.0
        self.norm_offset = structure.norm_offset - self._added
        #: The experts that this rank holds: all, or with expert parallelism as many in a row as each rank.
        self._experts = split(max(1, structure.experts), structure.ep, rank if structure.ep > 1 else 0)
        #: Tied parameters appear under both names.
        self._live = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = list(parameters(structure))
        self._by_kind = {(one.kind, one.layer, one.bias): one for one in self._parameters if one.sole}

    def _part(self, one: Parameter) -> Tensor | None:
        """This rank's part of a parameter, as it lives on the device; ``None`` if it is not there."""
        place = self._place(one)
        if place is None:
            return None
        live = self._live[place.name].detach()
        if place.index is not None:
            local = place.index - self._experts.start
            other = self._structure.ep > 1 and len(live) != self._experts.count
            if other or not 0 <= local < len(live):
                return None
            live = live[local]
        if place.transposed:
            live = live.T
        first, share = rows_of(one, self._structure, self._place_in(one))
        return live if share is None else live[first : first + share.count]

    def _place_in(self, one: Parameter) -> int:
        """This rank's place among those that share a parameter."""
        if one.expert is None:
            return self._tp_rank
        return self._rank if ranks_sharing(one, self._structure) > 1 else 0

    def _elsewhere(self, one: Parameter) -> bool:
        """Whether it is of an expert that another rank holds."""
        first = self._experts.start
        return one.expert is not None and not first <= one.expert < first + self._experts.count

    def _place(self, one: Parameter) -> LivePlace | None:
        """Where this engine holds it."""
        return next((place for place in one.places if place.name in self._live), None)

    def weight(self, kind: str, layer: int | None) -> Tensor | None:
        """Weight of the operator that produces a checkpoint: ``[out, in]`` of this rank, ``[n]`` of a norm."""
        one = self._by_kind.get((kind.removesuffix("_partial"), layer, False))
        if one is None:
            return None
        found = self._part(one)
        if found is None and kind == "logits" and self._structure.tied:
            return self.weight("embed", None)
        return found

    def bias(self, kind: str, layer: int | None) -> Tensor | None:
        """Bias of the operator that produces a checkpoint, ``[out]`` of this rank."""
        if kind.endswith("_partial"):  # added once, before the sum over ranks
            return None if self._tp_rank else self.bias(kind.removesuffix("_partial"), layer)
        one = self._by_kind.get((kind, layer, True))
        return None if one is None else self._part(one)

    # --------------------------------------------------------------------------------------------------- audit

    def audit(self, model_path: Path) -> Iterator[Audited]:
        """Compare every parameter with the checkpoint's files."""
        with ExitStack() as stack:
            files = _index(model_path, stack)
            seen: set[str] = set()
            for one in self._parameters:
                tensor = one.tensor
                if tensor not in files and one.kind == "logits" and self._structure.tied:
                    tensor = _EMBEDDING
                live = self._part(one)
                seen.update(place.name for place in one.places)
                if self._elsewhere(one):
                    continue
                if live is None and one.tensor not in files:
                    continue  # a bias or a tied head that this model does not have
                yield self._compare(one, tensor, files, live)
            for name in sorted(self._live.keys() - seen):
                yield Audited(name, NOT_OBSERVABLE, "", None, name, self._rank, why="no rule says what it holds")

    def _compare(self, one: Parameter, tensor: str, files: Mapping[str, Any], live: Tensor | None) -> Audited:
        handle = files.get(tensor)
        found = self._place(one) or one.places[0]
        place = found.name + ("" if found.index is None else f"[{found.index - self._experts.start}]")
        place += f"[{one.part}]" if one.part else ""
        about = (one.kind, one.layer, place, self._rank)
        if live is None:
            return Audited(one.tensor, NOT_OBSERVABLE, *about, why="the engine has no such parameter")
        if handle is None:
            return Audited(one.tensor, NOT_OBSERVABLE, *about, why="the checkpoint has no such tensor")
        whole = self._loaded(one, handle.get_tensor(tensor))
        start, stored = self._share(one, whole, live)
        current = live.to("cpu")
        if one.split == "vocab":  # rows behind the vocabulary are padding
            current = current[: stored.shape[0]]
        if current.shape != stored.shape:
            shapes = f"{list(current.shape)} against {list(stored.shape)}"
            return Audited(one.tensor, NOT_OBSERVABLE, *about, why=f"shapes differ: {shapes}")
        stored = stored.to(current.dtype)
        if torch.equal(stored, current):
            return Audited(one.tensor, EQUAL, *about)
        apart = (stored != current) & ~(stored.isnan() & current.isnan())
        if not bool(apart.any()):
            return Audited(one.tensor, EQUAL, *about)
        rows = apart.reshape(apart.shape[0], -1).any(-1).nonzero().flatten()
        gap = (stored[apart].float() - current[apart].float()).abs().nan_to_num(float("inf")).max()
        listed = tuple(int(row) + start for row in rows[:_LISTED])
        holds = self._holds(one, current, stored, whole, files)
        held = [other.expert for other in self._parameters if other.tensor == holds and self._structure.ep > 1]
        heads, due = self._heads(one, current, whole)
        if heads and not holds:
            holds = f"heads {', '.join(map(str, heads))}"
        return Audited(
            one.tensor, DIFFERS, *about, rows=listed, rows_total=len(rows), max_abs=float(gap), holds=holds,
            heads=heads, heads_due=due, why=f"{PACKED} {handle.tensor}" if isinstance(handle, PackedExpert) else "",
            expert_held=held[0] if held else None,
        )  # fmt: skip

    def _loaded(self, one: Parameter, stored: Tensor) -> Tensor:
        """What the engine's loader makes of a tensor of the files, in their dtype."""
        return stored + self._added if self._added and kinds()[one.kind].operators == ("rms_norm",) else stored

    def _heads(self, one: Parameter, current: Tensor, whole: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """``(heads of the checkpoint's tensor that a live parameter holds, heads that it should hold)``.

        The first are empty where one of its heads is none of the tensor's; both for what has no heads, and with one
        rank, which holds them all.
        """
        axis = dict(FUSED.get(one.part, ())).get(one.part, "")
        if axis not in ("heads", "kv_heads") or self._structure.tp == 1:
            return (), ()
        width = self._structure.head_dim
        stored = whole.reshape(-1, width, *whole.shape[1:])
        found: list[int] = []
        for head in current.reshape(-1, width, *current.shape[1:]):
            same = next((at for at, other in enumerate(stored) if _same(head, other)), None)
            if same is None:
                found = []
                break
            found.append(same)
        due = split(self._structure.size(axis), self._structure.tp, self._tp_rank)
        return tuple(found), tuple(range(due.start, due.start + due.count))

    def _holds(self, one: Parameter, current: Tensor, stored: Tensor, whole: Tensor, files: Mapping[str, Any]) -> str:
        """What a live parameter holds instead of ``stored``, its rank's share of ``whole``; empty if it is unknown."""
        if not bool(current.any()):
            return "zeros"
        if current.dim() > 1 and current.shape[0] == current.shape[1] and torch.equal(current, stored.T):
            return "its transpose"
        for rank in range(ranks_sharing(one, self._structure)):
            if rank != self._place_in(one) and _same(current, self._share(one, whole, current, rank)[1]):
                return f"the share of rank {rank}"
        near = [
            other
            for other in self._parameters
            if other is not one and other.tensor in files and other.split != "vocab"
            and (other.layer == one.layer or other.kind == one.kind)
        ]  # fmt: skip
        for other in sorted(near, key=lambda other: other.layer != one.layer):
            if files[other.tensor].get_slice(other.tensor).get_shape() != list(whole.shape):
                continue
            if _same(
                current,
                self._share(other, self._loaded(other, files[other.tensor].get_tensor(other.tensor)), current)[1],
            ):
                return other.tensor
        if current.numel() <= _SORTED and torch.equal(_sorted_rows(current), _sorted_rows(stored)):
            return "its own rows in another order"
        return ""

    def _share(self, one: Parameter, stored: Tensor, live: Tensor, of_rank: int | None = None) -> tuple[int, Tensor]:
        """``(first row, share)`` of the checkpoint's tensor that this rank, or another one, should hold."""
        tp, rank = ranks_sharing(one, self._structure), self._place_in(one) if of_rank is None else of_rank
        _, share = rows_of(one, self._structure, rank)
        if share is not None:
            return share.start, stored[share.start : share.start + share.count]
        if one.split == "columns" and tp > 1:
            columns = split(stored.shape[1], tp, rank)
            return 0, stored[:, columns.start : columns.start + columns.count]
        if one.split == "vocab" and live.shape[0] < stored.shape[0]:
            start = rank * live.shape[0]
            return start, stored[start : start + live.shape[0]]
        return 0, stored


def _same(live: Tensor, stored: Tensor) -> bool:
    """Whether a live tensor is what a file's becomes on loading; the first row decides nearly always."""
    if live.shape != stored.shape or not torch.equal(live[:1], stored[:1].to(live.dtype)):
        return False
    return torch.equal(live, stored.to(live.dtype))


def _sorted_rows(tensor: Tensor) -> Tensor:
    """Rows in one order, whatever theirs was; elements of a vector."""
    rows = tensor.reshape(tensor.shape[0], -1).float()
    order = torch.arange(len(rows))
    for column in (1, 0) if rows.shape[1] > 1 else (0,):  # by the first two columns, which tell rows apart
        order = order[rows[order, column].argsort(stable=True)]
    return rows[order]


def _index(model_path: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name → open file."""
    found = {}
    for path in sorted(model_path.glob("*.safetensors")):
        handle = stack.enter_context(safe_open(path, framework="pt"))
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            found[name] = handle
    return {**found, **unpacked(found)}


def write_audit(directory: Path, rank: int, audited: Iterator[Audited]) -> None:
    """Leave the audit of a rank for the driver."""
    temporary = directory / f"weights-rank{rank}.tmp"
    temporary.write_text(json.dumps([asdict(one) for one in audited]), encoding="utf-8")
    temporary.replace(directory / f"weights-rank{rank}.json")


def read_audits(directory: Path) -> list[Mapping[str, Any]]:
    """The audits of all ranks that left one."""
    found: list[Mapping[str, Any]] = []
    for path in sorted(directory.glob("weights-rank*.json")):
        found += json.loads(path.read_text(encoding="utf-8"))
    return found
