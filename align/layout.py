"""How a model is spread over devices: one (tp, dp, ep) triple, and the two engines' spellings of it.

``tp`` is the attention tensor-parallel size inside one data-parallel group, ``dp`` the number of groups and
``ep`` the expert-parallel size: 1 (experts are split like dense layers) or the whole world ``tp * dp``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: Keys under which the model families keep the number of routed experts.
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class Layout:
    """One parallel layout.

    Raises:
        ValueError: a size is not a positive integer, or ``ep`` is neither 1 nor ``tp * dp``.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("dp", self.dp), ("ep", self.ep)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}; valid: 1, 2, 4, …")
        if self.ep not in (1, self.world):
            valid = "1" if self.world == 1 else f"1 or {self.world}"
            raise ValueError(f"ep must be 1 or tp*dp, got ep={self.ep} with tp={self.tp} dp={self.dp}; valid: {valid}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp

    def __str__(self) -> str:
        return f"tp{self.tp} dp{self.dp} ep{self.ep}"

    def check_model(self, config: Mapping[str, Any]) -> None:
        """Check the layout against a parsed ``config.json``.

        Raises:
            ValueError: names the broken rule, the numbers and the valid tp (or ep) values.
        """
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        intermediate = int(config["intermediate_size"])
        experts = next((int(config[key]) for key in EXPERT_KEYS if config.get(key)), 0)
        rules: tuple[tuple[str, Callable[[int], bool]], ...] = (
            (f"tp must divide num_attention_heads ({heads})", lambda tp: heads % tp == 0),
            (
                f"tp must divide num_key_value_heads ({kv_heads}) or be a multiple of it",
                lambda tp: kv_heads % tp == 0 or tp % kv_heads == 0,
            ),
            (f"tp must divide intermediate_size ({intermediate})", lambda tp: intermediate % tp == 0),
        )
        valid = [tp for tp in range(1, heads + 1) if all(holds(tp) for _, holds in rules)]
        for rule, holds in rules:
            if not holds(self.tp):
                raise ValueError(f"{rule}, got tp={self.tp}; valid tp: {', '.join(map(str, valid))}")
        if self.ep > 1 and not experts:
            raise ValueError(f"ep must be 1 for a model without experts, got ep={self.ep}; valid ep: 1")
        if self.ep > 1 and experts % self.ep:
            divisors = [ep for ep in range(1, experts + 1) if experts % ep == 0]
            raise ValueError(
                f"ep must divide the number of experts ({experts}), got ep={self.ep}; "
                f"valid ep: {', '.join(map(str, divisors))}"
            )


def engine_flags(layout: Layout, engine: str) -> tuple[str, ...]:
    """Command-line flags by which ``engine`` is asked for ``layout``.

    lmdeploy counts the data-parallel groups inside its ``--tp`` unless experts are parallel; vllm counts them
    apart.

    Raises:
        ValueError: the engine has no parallel layouts here.
    """
    if engine == "lmdeploy":
        if layout.ep == 1:
            return ("--tp", str(layout.world), "--dp", str(layout.dp))
        return ("--tp", str(layout.tp), "--dp", str(layout.dp), "--ep", str(layout.ep))
    if engine == "vllm":
        flags = ("--tensor-parallel-size", str(layout.tp), "--data-parallel-size", str(layout.dp))
        return (*flags, "--enable-expert-parallel") if layout.ep > 1 else flags
    raise ValueError(f"engine {engine!r} takes no layout; valid: lmdeploy, vllm")
