"""How a model is spread over devices: one (tp, dp, ep) triple.

``tp`` is the attention tensor-parallel size inside one data-parallel group, ``dp`` the number of groups and
``ep`` the expert-parallel size: 1 (experts are split like dense layers) or the whole world ``tp * dp``.
"""

from __future__ import annotations

import re
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

    @property
    def name(self) -> str:
        """For a directory: ``tp2_dp1_ep1``."""
        return str(self).replace(" ", "_")

    def within(self, other: Layout) -> bool:
        """Whether no dimension is larger than the other's: the simpler of the two, or the same."""
        return self.tp <= other.tp and self.dp <= other.dp and self.ep <= other.ep

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


_SIZE = re.compile(r"(tp|dp|ep)\s*=?\s*(\d+)\s*")


def parse_layout(text: str) -> Layout:
    """``tp2 dp2``, in any order; what is not named is 1.

    Raises:
        ValueError: the text is no layout, names a dimension twice, or breaks a rule of a triple.
    """
    rest, sizes = text.strip().lower(), {}
    while rest:
        found = _SIZE.match(rest)
        if found is None or found[1] in sizes:
            raise ValueError(f"{text.strip()!r} is no layout; valid: tp2, tp2 dp2, tp2 dp2 ep4, …")
        sizes[found[1]] = int(found[2])
        rest = rest[found.end() :]
    if not sizes:
        raise ValueError("a layout is empty; valid: tp2, tp2 dp2, tp2 dp2 ep4, …")
    return Layout(**sizes)
