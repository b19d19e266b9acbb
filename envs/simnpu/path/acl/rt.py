"""Stand-in for ``acl.rt``."""

from __future__ import annotations

from typing import Any


def memcpy(*_: Any) -> Any:
    raise RuntimeError("simnpu: acl.rt.memcpy is not simulated; launch the engine without sleep mode or KV transfer")
