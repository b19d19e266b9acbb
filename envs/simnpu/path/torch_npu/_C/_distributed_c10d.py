"""Mirrors the HCCL process group's names. Collectives of the ``hccl`` backend run over gloo (torch_npu._sim)."""

from __future__ import annotations

from typing import Any


class ProcessGroupHCCL:
    class Options:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.hccl_config: dict[str, Any] = {}
            self.op_timeout: Any = None
            self.global_ranks_in_group: list[int] = []
            self.group_id = ""
