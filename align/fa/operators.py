"""The operators that are checked: their published arguments, and which argument plays which part.

``signatures.tsv`` holds the names, types and defaults that torch_npu 2.11 registers; ``operators.tsv`` the family of an
operator and its roles, such as ``scale=softmax_scale``, so that a rule is written once for all names.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

#: Of operators that attend. The others write a cache.
ATTENTION = ("fia", "pfa", "ifa", "training", "atb_prefill", "atb_paged")
#: Those of CANN that share masks, sparse modes and layouts.
FUSED = ("fia", "pfa", "ifa", "training")
#: Input part of a layout → its axes: batch, sequence, tokens, heads, dim of a head, all heads together.
AXES = {"BSH": "BSH", "SBH": "SBH", "BSND": "BSND", "BNSD": "BNSD", "TND": "TND", "NTD": "NTD"}


@dataclass(frozen=True)
class Argument:
    """One argument of a published signature; ``default`` is ``None`` also where there is none (``required``)."""

    name: str
    type: str
    default: Any
    required: bool

    @property
    def tensor(self) -> bool:
        return self.type.startswith("Tensor")


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
        name: as registered, without a namespace.
        family: ``fia``, ``pfa``, ``ifa``, ``training``, ``atb_prefill``, ``atb_paged``, ``write``, ``scatter``,
            ``scatter_nd`` or ``fused_write``.
        version: ``v1`` or ``v2`` of fused-infer attention, otherwise empty.
        layout: that it has without an argument for it.
        roles: part → name of the argument that plays it.
        arguments: by name, in order.
    """

    name: str
    family: str
    version: str
    layout: str
    roles: Mapping[str, str]
    arguments: Mapping[str, Argument]

    def name_of(self, role: str) -> str | None:
        """The argument that plays a part; ``query``, ``key`` and ``value`` are called so unless the table differs."""
        named = self.roles.get(role, role)
        return named if named in self.arguments else None


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a table beside this file."""
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    for row in rows:
        assert None not in row and None not in row.values(), f"{name}: a line of another length: {row}"
    return rows


@cache
def operators() -> Mapping[str, Operator]:
    """All operators by name."""
    signatures: dict[str, dict[str, Argument]] = {}
    for row in rows_of("signatures.tsv"):
        one = Argument(row["name"], row["type"], _default(row["type"], row["default"]), row["default"] == "-")
        signatures.setdefault(row["operator"], {})[one.name] = one
    found = {}
    for row in rows_of("operators.tsv"):
        roles = dict(pair.split("=") for pair in row["roles"].split())
        name = row["operator"]
        found[name] = Operator(name, row["family"], row["version"], row["layout"], roles, signatures[name])
    return found


def _default(kind: str, text: str) -> Any:
    if text in ("-", "None"):
        return None
    if kind.startswith("int"):
        return int(text)
    if kind.startswith("float"):
        return float(text)
    return text == "True" if kind == "bool" else text


def resolve(name: str) -> Operator:
    """The operator of a name in any of its spellings: ``torch_npu.x``, ``torch.ops.npu.x``, ``npu::x``, ``x.default``,
    ``x.out``.

    Raises:
        ValueError: it is none that is checked.
    """
    known = operators()
    parts = name.replace("::", ".").split(".")
    for part in reversed(parts):
        if part in known:
            return known[part]
    raise ValueError(f"no attention or cache operator {name!r}; there are {', '.join(known)}")
