"""Environment variables that both engines inherit and that may change one of them alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from align.doctor.types import Check, Machine, Needs

_PREFIXES = ("DLINFER_", "LMDEPLOY_", "RAY_", "VLLM_")
#: Set by a run itself or meant for it, or harmless.
_OURS = frozenset(
    {
        *("LMDEPLOY_PYTHON", "VLLM_PYTHON", "LMDEPLOY_SKIP_WARMUP"),
        *("VLLM_NO_USAGE_STATS", "VLLM_VERSION", "VLLM_HOST_IP", "VLLM_ENABLE_V1_MULTIPROCESSING"),
        *("RAY_ADDRESS", "RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"),
    }
)


def examine(machine: Machine, needs: Needs) -> Iterator[Check]:
    """Those of the engines and of Ray."""
    yield variables(machine.environ)


def variables(environ: Mapping[str, str]) -> Check:
    """Args: environment variables by name."""
    names = sorted(name for name in environ if name.startswith(_PREFIXES) and name not in _OURS)
    if names:
        found = f"{', '.join(names)}: an engine or Ray reads {'it' if len(names) == 1 else 'them'}"
        return Check("variables", "warning", found, f"unset {' '.join(names)}")
    return Check("variables", "ok", "none that changes an engine")
