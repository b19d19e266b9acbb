"""Entry point of ``vllm.general_plugins``: vLLM calls it in every process it starts.

The hooks themselves arrive with torch (:mod:`adapters.probe.boot`); where torch was told not to load backends on its
own, this makes up for it.
"""

from __future__ import annotations

from adapters.probe import boot


def register() -> None:
    boot.autoload()
