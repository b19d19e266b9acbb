"""The shapes in which an engine holds its tensors, as far as they can be rebuilt from canonical ones.

The engine's table of taps says by which transform each checkpoint was taken; the transform's inverse gives the native
tensor back. The parts of a fused projection make one tensor together, called after what it fuses: ``attn.qkv``,
``mlp.gate_up``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from adapters.probe.taps import PSEUDO, Tap, load_taps
from adapters.probe.transforms import TRANSFORMS, Dims
from align.checkpoints.table import kinds
from align.trace.pt_names import kind_and_layer
from align.trace.reader import Trace


@dataclass(frozen=True)
class NativeTensor:
    """One tensor to be written: the canonical parts that make it, in order.

    Attributes:
        kind, layer: what it is called; a checkpoint's kind, or that of a fused tensor.
        names: the checkpoints in it.
        transform: by which they were taken; ``None`` where the canonical form stays.
    """

    kind: str
    layer: int | None
    names: tuple[str, ...]
    transform: str | None

    def build(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        """From canonical parts ``[T, …]``, local to a rank, to the native tensor."""
        if self.transform is None:
            return parts[0]
        inverse = TRANSFORMS[self.transform].inverse
        assert inverse is not None, self.transform
        return inverse(parts, dims)


@dataclass(frozen=True)
class NativeForms:
    """How one engine's tensors are rebuilt.

    Attributes:
        engine: its name.
        transforms: kind → transform with an inverse.
        fusions: kind of a fused tensor → the kinds that it fuses, in order.
        canonical: kind → why it has no native form.
    """

    engine: str
    transforms: Mapping[str, str]
    fusions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    canonical: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: str) -> NativeForms:
        """As the engine's taps say.

        Raises:
            ValueError: an engine without taps.
        """
        taps = load_taps(engine)
        fusions = dict(_fusions(taps))
        fused = {part for parts in fusions.values() for part in parts}
        transforms: dict[str, str] = {}
        canonical: dict[str, str] = {}
        for tap in taps:
            if TRANSFORMS[tap.transform].inverse is None:
                canonical[tap.checkpoint] = f"its transform has no inverse ({tap.inverse})"
            elif "." in tap.transform and tap.checkpoint not in fused:
                canonical[tap.checkpoint] = "the other parts of its fused tensor are not tapped"
            else:
                transforms[tap.checkpoint] = tap.transform
        return cls(engine, transforms, fusions, canonical)

    def plan(self, names: Collection[str]) -> tuple[tuple[NativeTensor, ...], dict[str, str]]:
        """The tensors that hold the given checkpoints of one step, and kind → why it stays canonical."""
        planned: dict[tuple[str, int | None], NativeTensor] = {}
        why: dict[str, str] = {}
        for name in sorted(names):
            kind, layer = kind_and_layer(name)
            fused = self.fused(kind)
            if fused is not None:
                parts = tuple(kinds()[part].at(layer) for part in self.fusions[fused])
                if set(parts) <= set(names):
                    planned[fused, layer] = NativeTensor(fused, layer, parts, self.transforms[kind])
                    continue
                why[kind] = f"some steps lack values of a part of {fused}"
            elif kind not in self.transforms:
                why[kind] = self.canonical.get(kind, f"{self.engine} has no tap for it")
            planned[kind, layer] = NativeTensor(
                kind, layer, (name,), None if fused is not None else self.transforms.get(kind)
            )
        return tuple(planned.values()), why

    def fused(self, kind: str) -> str | None:
        """The fused tensor that a kind is a part of."""
        return next((fused for fused, parts in self.fusions.items() if kind in parts), None)

    def held_in(self, name: str) -> dict[str, str | None]:
        """What a file holds: checkpoint → how it is taken of the tensor there, ``None`` if that is canonical.

        Args:
            name: as :func:`align.trace.pt_names.read_file_name` gives it: a checkpoint, or ``layer0_attn_qkv_output``.
        """
        try:
            kind, _ = kind_and_layer(name)
        except ValueError:
            return self._held_in_fused(name) or {name: None}  # or a file that was put there later
        return {name: None if self.fused(kind) is not None else self.transforms.get(kind)}

    def _held_in_fused(self, name: str) -> dict[str, str | None]:
        for fused, parts in self.fusions.items():
            match = re.fullmatch(rf"(?:layer(\d+)_)?{re.escape(fused.replace('.', '_'))}_output", name)
            if match is not None and all(kinds()[part].per_layer == (match[1] is not None) for part in parts):
                layer = None if match[1] is None else int(match[1])
                return {kinds()[part].at(layer): self.transforms[part] for part in parts}
        return {}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; what stays canonical is said by whoever writes."""
        return {
            "engine": self.engine,
            "transforms": dict(self.transforms),
            "fusions": {fused: list(parts) for fused, parts in self.fusions.items()},
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> NativeForms:
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: malformed, or a transform that this version does not know.
        """
        # Whatever is wrong with an index is said once, not by each file.
        unknown = sorted(set(plain["transforms"].values()) - TRANSFORMS.keys())
        if unknown:
            raise ValueError(f"transform {', '.join(unknown)} is not known")
        fusions = {fused: tuple(parts) for fused, parts in plain["fusions"].items()}
        strangers = sorted({part for parts in fusions.values() for part in parts} - plain["transforms"].keys())
        if strangers or not plain["transforms"].keys() <= kinds().keys() | set(PSEUDO):
            raise ValueError("it names checkpoints that are not in the table")
        return cls(str(plain["engine"]), dict(plain["transforms"]), fusions)


def _fusions(taps: Sequence[Tap]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What is taken of one tensor in parts, if all of its parts are taken."""
    groups: dict[tuple[str, str, str, str], dict[str, str]] = {}
    for tap in taps:
        family, dot, _ = tap.transform.rpartition(".")
        if dot:
            groups.setdefault((tap.site, tap.attribute, tap.pick, family), {})[tap.transform] = tap.checkpoint
    for (*_, family), found in groups.items():
        order = [name for name in TRANSFORMS if name.startswith(f"{family}.")]  # as their inverse takes them
        if set(order) == set(found):
            parts = tuple(found[name] for name in order)
            name = f"{parts[0].rpartition('.')[0]}.{family.rstrip('0123456789')}"
            assert name not in kinds(), f"a fused tensor would be called as the checkpoint {name}"
            yield name, parts


def dims_of(trace: Trace, rank: int) -> Dims:
    """Sizes of a rank's tensors.

    Raises:
        ValueError: an architecture without a table.
    """
    structure = trace.structure

    def own(kind: str, whole: int) -> int:
        shard = trace.shard(rank, kind)
        return whole if shard is None else shard.count

    return Dims(
        heads=own("attn.q", structure.heads),
        kv_heads=own("attn.k", structure.kv_heads),
        head_dim=structure.head_dim,
        intermediate=own("mlp.gate", structure.intermediate),
    )


def dims_to(dims: Dims) -> dict[str, int]:
    """JSON-able form."""
    return asdict(dims)


def dims_from(plain: Mapping[str, Any]) -> Dims:
    """The inverse of :func:`dims_to`.

    Raises:
        TypeError, ValueError: malformed.
    """
    return Dims(**{name: int(size) for name, size in plain.items()})
