"""The audit of the KV cache's indices, side by side."""

from __future__ import annotations

from pydantic import Field

from align.result.parts import Documented


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
