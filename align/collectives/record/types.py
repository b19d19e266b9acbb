"""One collective as one rank saw it.

Every rank writes one record per call, in its own order. What belongs together is found by ``(generation, group, place
in the group)``: ranks issue the collectives of one group in one order, or something is wrong (design §8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

#: Operations by what they promise; several functions of ``torch.distributed`` share one.
ALL_REDUCE, ALL_GATHER, GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, BARRIER, DISPATCH, COMBINE = OPERATIONS = (
    "all_reduce", "all_gather", "gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "dispatch", "combine",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where in a run a call stands.

    Attributes:
        generation: number of the run of this launch, 0 before the first.
        step: of the forward that runs or ran last on this rank, -1 before the first.
        dummy: that forward has no requests.
        inside: checkpoints of the tapped function that is running, ``("layers.1.attn.o",)``; empty outside of any.
        after: checkpoint that was seen last before the call; empty if none was in this step.
    """

    generation: int
    step: int
    dummy: bool = False
    inside: tuple[str, ...] = ()
    after: str = ""


@dataclass(frozen=True)
class CollectiveCall:
    """One call on one rank.

    Attributes:
        rank: global rank of the caller.
        at: count of this rank's calls over the launch, from 0, all groups together.
        in_group: count of this rank's calls of this group over the launch, from 0.
        group: global ranks of the group, in its order.
        group_name: torch's name of the group; two groups may have the same ranks.
        backend: ``hccl``, ``gloo``, …
        operation: one of :data:`OPERATIONS`.
        function: as it was called, ``torch.distributed.all_gather_into_tensor``.
        reduce: ``sum``, ``max``, …; empty where nothing is reduced.
        root: global rank of the source or destination; ``None`` where there is none.
        sent, received: rows that went to and came from each rank of the group, where they were asked for; else empty.
        about: other arguments, JSON-able.
        dtype: of the tensors, without ``torch.``.
        given, got: shapes of the tensors before and after, ``((T, hidden),)``; one entry per rank for lists.
        site: ``file:line function`` of the engine's frames, the innermost first.
        place: where in the run.
        ended: whether it came back; a call that hangs or fails never does.
        error: what it failed with.
        checksum_in, checksum_out: of the bytes; empty if not taken.
        values: whether the tensors are in the file.
        why: why they are not.
        tensors: ``in.0 …`` and ``out.0 …``, copies on the host, in the rank's native form.
    """

    rank: int
    at: int
    in_group: int
    group: tuple[int, ...]
    group_name: str
    backend: str
    operation: str
    function: str
    dtype: str
    given: tuple[tuple[int, ...], ...]
    got: tuple[tuple[int, ...], ...]
    place: Place
    reduce: str = ""
    root: int | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    site: tuple[str, ...] = ()
    ended: bool = True
    error: str = ""
    checksum_in: str = ""
    checksum_out: str = ""
    values: bool = False
    why: str = ""
    tensors: Mapping[str, Tensor] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        assert self.operation in OPERATIONS, self.operation

    @property
    def where(self) -> str:
        """The checkpoint that the call belongs to, as far as it is known: the one that is being computed."""
        return self.place.inside[-1] if self.place.inside else self.place.after

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, without the tensors."""
        plain = asdict(replace(self, tensors={}))
        del plain["tensors"]
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> CollectiveCall:
        """The inverse of :meth:`to_dict`, also of its JSON."""
        place = dict(plain["place"])
        place["inside"] = tuple(place["inside"])
        shapes = {key: tuple(tuple(shape) for shape in plain[key]) for key in ("given", "got")}
        return cls(**{
            **plain, **shapes, "sent": tuple(plain.get("sent", ())), "received": tuple(plain.get("received", ())),
            "group": tuple(plain["group"]), "site": tuple(plain["site"]), "place": Place(**place),
            "tensors": tensors or {},
        })  # fmt: skip
