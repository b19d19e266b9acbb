"""The audit of the KV cache's indices, side by side."""

from __future__ import annotations

from pydantic import Field

from align.result.parts import Documented


class LedgerLooked(Documented):
    """How much the audit looked at, over all ranks and all runs of the launch."""

    writes: int
    """Slots of key rows, one for each row and layer, padding and dummies included."""
    tables: int
    """Block tables of requests, one for each request and forward."""
    lengths: int
    """Key lengths of requests, likewise."""
    prefill_lengths: int
    """Of these such as a prompt, or a part of one, leaves."""
    layer_lengths: int
    """Lengths that a layer after the first was handed, compared with the first layer's."""
    table_dtypes: dict[str, int]
    """Dtype of the block tables as handed to the operators, and in how many forwards."""
    slot_dtypes: dict[str, int]
    """The same of the slots."""
    idle_rows: int
    """Rows of dummies that keep data-parallel groups without requests in step."""


class LedgerAudit(Documented):
    """Every index of one side's KV cache, replayed against a shadow of the cache. Its faults are findings of path A."""

    observable: bool
    """Whether indices of the recorded run were looked at. If not, ``unseen`` says why, and nothing is known of them."""
    records: int = 0
    """Forwards whose indices were audited, of all runs of the launch and all ranks."""
    runs: list[int] = Field(default_factory=list)
    """Numbers of these runs, from 1; 0 is what the engine computed before the first, such as warm-up."""
    recorded_run: int = 0
    """The run that the tensors were recorded of."""
    bytes: int = 0
    """Size of the records."""
    faults: int = 0
    """How many there are in all runs; several of one kind are one finding. 0 is a pass of what was seen alone."""
    unseen: list[str] = Field(default_factory=list)
    """What could not be judged, and why. Nothing of it is a pass."""
    looked: LedgerLooked | None = None
    """How much was; null where nothing was, and in results of an earlier version."""
