"""Puts the other side's tensors in this side's place, inside the engine, before anything downstream reads them.

The driver leaves the tensors in a directory (:func:`write_tensors`): whole, canonical, one row per (request, position,
occurrence). A worker overwrites the rows of its step at the tap of each named checkpoint, every rank its own shard, and
leaves in the same directory how many rows that were (:class:`Replaced`): a transplant that replaced nothing must never
pass for one without effect. Rows that the other side does not have stay as they are.

* A tap on a result replaces right after the call, one on an argument right before it. The canonical form is a view of
  the engine's own tensor in nearly all cases; where it is a copy, the tap's inverse rebuilds the native tensor.
* The residual stream (``block_in``, ``mid``, ``final_in``) is the second result of a fused add and norm, whose first
  result was made of the same sum, before that was rounded. So the call is given the other side's summands, or without
  them ``tensor + 0``: the sum is then the other side's, and the norm beside it is this side's own norm of it. If the
  sum still differs, the new residual alone is overwritten, and a note says so. Where there is no sum yet (layer 0), the
  argument is overwritten before the call.
* Cache slots, block tables and the summands of ranks have no inverse and are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from adapters.base import RowSpan
from adapters.probe.spec import TransplantSpec
from adapters.probe.transforms import TRANSFORMS, Dims
from align.checkpoints.shards import shards
from align.checkpoints.table import Kind, Structure, parse

_TENSORS, _ROWS = "tensors.safetensors", "rows.json"
#: (request, position, occurrence).
RowName = tuple[str, int, int]
#: How rows were replaced.
IN_PLACE, INVERSE, THROUGH_SUM = "in place", "through the tap's inverse", "through the fused sum"
#: Note of a residual that the fused call did not add up to.
OTHER_SUM = "the call does not return the other side's sum of the other side's summands; its norm is of another sum"
#: Behind a residual's name: the stream and what was added to it.
SUMMANDS = ("#stream", "#added")


@dataclass
class Replaced:
    """What one rank replaced in a run, by checkpoint.

    Attributes:
        rows: how many, over all steps.
        how: see :data:`IN_PLACE`, :data:`INVERSE`, :data:`THROUGH_SUM`.
        notes: what one should know about it.
        failures: why it could not be replaced, or not everywhere.
    """

    rank: int
    rows: dict[str, int] = field(default_factory=dict)
    how: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def write_tensors(directory: Path, tensors: Mapping[str, Tensor], rows: Mapping[str, Sequence[RowName]]) -> None:
    """Leave tensors for a transplant.

    Args:
        directory: made if need be.
        tensors: by checkpoint, ``[N, *channels]``, whole and canonical; a residual's summands behind its name, see
            :data:`SUMMANDS`.
        rows: by checkpoint, the N rows.
    """
    assert all(len(rows[name.partition("#")[0]]) == len(tensor) for name, tensor in tensors.items()), "rows differ"
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / _TENSORS)
    (directory / _ROWS).write_text(json.dumps({name: list(found) for name, found in rows.items()}), encoding="utf-8")


def read_tensors(directory: Path, name: str) -> tuple[Tensor, list[RowName]]:
    """One checkpoint's tensor ``[N, *channels]`` of :func:`write_tensors`, and its N rows.

    Raises:
        LookupError: it is not there, or cannot be read.
    """
    try:
        with safe_open(directory / _TENSORS, framework="pt") as file:
            tensor = file.get_tensor(name)
        listed = json.loads((directory / _ROWS).read_text(encoding="utf-8"))[name]
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise LookupError(f"its tensor cannot be read: {error}") from error
    return tensor, [(request, position, occurrence) for request, position, occurrence in listed]


def rows_of(spans: Sequence[RowSpan]) -> list[RowName]:
    """Every row of a step, in batch order."""
    return [
        (row.request, position, row.occurrence) for row in spans for position in range(row.start, row.start + row.count)
    ]


def read_replaced(directory: Path) -> dict[int, Replaced]:
    """What each rank left; one that left nothing is absent."""
    found = {}
    for path in directory.glob("rank*.json"):
        one = Replaced(**json.loads(path.read_text(encoding="utf-8")))
        found[one.rank] = one
    return dict(sorted(found.items()))


def no_inverse(kind: Kind, transform: str | None = None) -> str | None:
    """Why a checkpoint cannot be replaced; ``None`` if it can."""
    if kind.integer:
        return f"no inverse: {kind.name} is this engine's own numbering"
    if kind.shard == "partial":
        return f"no inverse: {kind.name} is a summand of each rank, and only the sum is comparable"
    if transform is not None and TRANSFORMS[transform].inverse is None:
        return f"no inverse: {TRANSFORMS[transform].undo}"
    return None


class Transplant:
    """The transplant of one rank and run.

    Attributes:
        rows: spans of the running step in batch order; whoever runs the step sets them.
    """

    def __init__(self, spec: TransplantSpec, structure: Structure, rank: int, tp_rank: int) -> None:
        self.rows: tuple[RowSpan, ...] = ()
        self._directory = Path(spec.directory)
        self._dims = Dims.of(structure, tp_rank)
        self._said = Replaced(rank, rows=dict.fromkeys(spec.checkpoints, 0))
        #: Sums whose summands were given to the call that runs.
        self._entered: set[str] = set()
        self._given: dict[str, tuple[Tensor, dict[RowName, int]]] = {}
        self._summands: dict[str, tuple[Tensor, Tensor]] = {}
        parts = shards(structure, tp_rank)
        for name in spec.checkpoints:
            try:
                kind = parse(name).kind
                why = no_inverse(kind)
                if why is not None:
                    raise LookupError(why)
                tensor, rows, summands = self._read(name)
                if summands is not None:
                    self._summands[name] = summands
                part = parts.get(kind.name)
                if part is not None:
                    tensor = tensor.narrow(kind.axes.index(kind.shard), part.start, part.count)
                self._given[name] = tensor.contiguous(), {row: index for index, row in enumerate(rows)}
            except Exception as error:  # whatever is wrong with what was given; the driver hears of it
                self.fail(name, error)

    def _read(self, name: str) -> tuple[Tensor, list[RowName], tuple[Tensor, Tensor] | None]:
        tensor, rows = read_tensors(self._directory, name)
        with safe_open(self._directory / _TENSORS, framework="pt") as file:
            parts = [file.get_tensor(name + one) for one in SUMMANDS if name + one in file.keys()]  # noqa: SIM118
        return tensor, rows, (parts[0], parts[1]) if len(parts) == len(SUMMANDS) else None

    def fail(self, name: str, error: Exception) -> None:
        """Keep why a checkpoint was not replaced; the first reason counts."""
        text = str(error) if isinstance(error, (LookupError, ValueError)) else f"{type(error).__name__}: {error}"
        self._said.failures.setdefault(name, text)

    def leave(self) -> None:
        """Say what was replaced so far."""
        target = self._directory / f"rank{self._said.rank}.json"
        temporary = target.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self._said)), encoding="utf-8")
        os.replace(temporary, target)

    # ------------------------------------------------------------------------------------------------------ taps

    def name(self, checkpoint: str, layer: int | None) -> str | None:
        """The name at a tap, if it is to be replaced and can be."""
        name = checkpoint if layer is None else f"layers.{layer}.{checkpoint}"
        return name if name in self._given else None

    def at_tap(self, name: str, native: Any, transform: str) -> None:
        """Replace the step's rows in what a tap picked; an error is kept for the driver and never stops the engine."""
        try:
            why = no_inverse(parse(name).kind, transform)
            if why is not None:
                raise LookupError(why)
            if not isinstance(native, Tensor):
                raise ValueError(f"the tap holds a {type(native).__name__}")
            here, there = self._places(name)
            view = self._view(name, native, transform)
            if name in self._entered:  # counted on the way in
                self._entered.discard(name)
                if not self._has(view, name, here, there):
                    self._said.notes[name] = OTHER_SUM
                    self._write(name, native, view, transform, here, there)
                return
            how = self._write(name, native, view, transform, here, there)
            self._count(name, len(here), how)
        except Exception as error:
            self.fail(name, error)

    def into_sum(
        self, name: str, parameters: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], transform: str
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a fused add and norm whose sum is to be the other side's residual.

        Args:
            parameters: of the call, without ``self``; the first is the summand, ``residual`` the stream so far.
        """
        try:
            first = parameters[0]
            x, residual = (argument_of(one, parameters, args, kwargs) for one in (first, "residual"))
            if not isinstance(x, Tensor):
                raise ValueError(f"the call has no {first}")
            here, there = self._places(name)
            if residual is None:  # it is the stream itself, and nothing is added
                how = self._write(name, x, self._view(name, x, transform), transform, here, there)
                self._count(name, len(here), how)
                self._entered.add(name)
                return args, kwargs
            x, residual = x.clone(), residual.clone()
            given = self._given[name][0]
            stream, added = self._summands.get(name, (torch.zeros_like(given), given))
            for part, source in ((x, added), (residual, stream)):
                view = self._view(name, part, transform)
                if not _shares(view, part):
                    raise ValueError("its canonical form is a copy")
                view[here.to(view.device)] = source[there].to(device=view.device, dtype=view.dtype)
            self._count(name, len(here), THROUGH_SUM)
            self._entered.add(name)
            for one, value in ((first, x), ("residual", residual)):
                args, kwargs = with_argument(one, value, parameters, args, kwargs)
        except Exception as error:
            self.fail(name, error)
        return args, kwargs

    def _count(self, name: str, rows: int, how: str) -> None:
        self._said.rows[name] += rows
        if how not in self._said.how.setdefault(name, []):
            self._said.how[name].append(how)

    def _places(self, name: str) -> tuple[Tensor, Tensor]:
        """Rows of the step that are replaced, and where they stand in what was given: int64 ``[n]`` each."""
        if parse(name).kind.axes[0] == "requests":
            keys = [(row.request, row.start + row.count - 1, row.occurrence) for row in self.rows]
        else:
            keys = rows_of(self.rows)
        index = self._given[name][1]
        pairs = [(here, index[key]) for here, key in enumerate(keys) if key in index]
        here, there = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
        return here, there

    def _view(self, name: str, native: Tensor, transform: str) -> Tensor:
        """The canonical form of a native tensor.

        Raises:
            ValueError: it has other channels than the tensor that was given, or fewer rows than the step.
        """
        view = TRANSFORMS[transform].forward(native, self._dims)
        given = self._given[name][0]
        heads = parse(name).kind.axes[0] == "requests"
        rows = len(self.rows) if heads else sum(row.count for row in self.rows)
        if view.shape[1:] != given.shape[1:]:
            raise ValueError(f"{list(view.shape[1:])} per row here, {list(given.shape[1:])} on the other side")
        if view.shape[0] < rows:
            raise ValueError(f"{view.shape[0]} rows were seen, the step has {rows}")
        return view

    def _has(self, view: Tensor, name: str, here: Tensor, there: Tensor) -> bool:
        mine = view[here.to(view.device)].cpu()
        wanted = self._given[name][0][there].to(mine.dtype)
        return bool(((mine == wanted) | (mine.isnan() & wanted.isnan())).all())

    def _write(self, name: str, native: Tensor, view: Tensor, transform: str, here: Tensor, there: Tensor) -> str:
        """Overwrite rows of the engine's own tensor, and say how."""
        source = self._given[name][0][there].to(device=view.device, dtype=view.dtype)
        at = here.to(view.device)
        if _shares(view, native):
            view[at] = source
            return IN_PLACE
        form = TRANSFORMS[transform]
        assert form.inverse is not None, transform
        family = transform.partition(".")[0]
        parts = []
        for other in (one for one in TRANSFORMS if one.partition(".")[0] == family):
            part = TRANSFORMS[other].forward(native, self._dims).clone()
            if other == transform:
                part[at] = source
            parts.append(part)
        native.copy_(form.inverse(parts, self._dims).reshape(native.shape))
        return INVERSE


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def argument_of(name: str, parameters: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An argument of a call; ``None`` if it was not given."""
    if name in kwargs:
        return kwargs[name]
    place = parameters.index(name) if name in parameters else len(args)
    return args[place] if place < len(args) else None


def with_argument(
    name: str, value: Any, parameters: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with another argument."""
    place = parameters.index(name)
    if name in kwargs or place >= len(args):
        return args, {**kwargs, name: value}
    return (*args[:place], value, *args[place + 1 :]), kwargs
