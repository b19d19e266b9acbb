"""Floors made of chosen numbers."""

from __future__ import annotations

from typing import Any

from align.calibrate.floor import Floor, FloorRun, Provenance, floor_of
from align.calibrate.measure import Sample


def provenance(**changes: Any) -> Provenance:
    plain: dict[str, Any] = {
        "created": "2030-01-01T00:00:00+00:00",
        "command": ("align", "calibrate"),
        "align": "0.1.0",
        "versions": {"lmdeploy": {"torch": "2"}, "vllm": {"torch": "2"}},
        "device": "simnpu",
        "simulated": True,
        "model": "tiny",
        "fingerprint": "f" * 16,
        "architecture": "LlamaForCausalLM",
        "layers": 2,
        "layout": "tp1 dp1 ep1",
        "runs": (FloorRun(name="run1", change="as it is", verdict="aligned", directory="/somewhere"),),
        "pairs": ("run1 candidate / reference",),
        "golden": True,
        "rows": 7,
    }
    return Provenance(**{**plain, **changes})


def samples(kind: str, metric: str, largest: float, count: int = 100) -> list[Sample]:
    """Numbers that reach ``largest``; all equal, so that the margin is the least one."""
    return [Sample(kind, metric, largest, largest / 100, f"{kind} {at}") for at in range(count)]


def floor(name: str = "tiny", dtype: str = "bfloat16", golden: float = 0.0, **changes: Any) -> Floor:
    """``attn.q``: whole 1, token 2, channel 3, head 1; ``embed`` was always equal; ``mlp.up`` is as wide as derived."""
    sides = [
        one
        for metric, largest in (("whole", 1.0), ("token", 2.0), ("channel", 3.0), ("head", 1.0))
        for one in samples("attn.q", metric, largest)
    ]
    sides += samples("embed", "whole", 0.0) + samples("mlp.up", "whole", 50.0)
    far = samples("attn.q", "whole", golden) if golden else []
    return floor_of(name, dtype, provenance(**changes), sides, far, samples("attn.q", "element", 0.9))
