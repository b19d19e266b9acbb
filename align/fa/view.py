"""A call read through its roles: what the conditions ask for, whatever the operator calls it.

Everything here is derived from the arguments and the context, and ``None`` where these do not say it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from align.fa.call import Call, Context, MaskFacts, TensorFacts
from align.fa.operators import ATTENTION, AXES, Operator, resolve

#: Side of the compressed mask of sparse modes 2, 3 and 4.
COMPRESSED = 2048
#: Width of a latent query; with rope apart this is the absorbed form.
LATENT = 512
#: ``pre_tokens`` and ``next_tokens`` that limit nothing.
UNLIMITED = 2147483647


@dataclass(frozen=True)
class Lengths:
    """A length argument: was it passed (and not ``None``), and its values if they are known."""

    given: bool
    values: tuple[int, ...] | None


class View:
    """A call, its operator, and what follows from them."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.operator: Operator = resolve(call.operator)

    # -------------------------------------------------------------------------------------------------- arguments

    @property
    def context(self) -> Context:
        return self.call.context

    def name(self, role: str) -> str:
        """What the operator calls a part; the part's own name if it has none."""
        return self.operator.name_of(role) or role

    def has(self, role: str) -> bool:
        """Whether the operator has such an argument."""
        return self.operator.name_of(role) is not None

    def passed(self, role: str) -> bool:
        """Whether the call has it, and not as ``None``."""
        return self.call.arguments.get(self.name(role)) is not None

    def get(self, role: str) -> Any:
        """The value passed, or the default; ``None`` for a tensor that was left out."""
        name = self.operator.name_of(role)
        if name is None:
            return None
        if name in self.call.arguments:
            return self.call.arguments[name]
        return self.operator.arguments[name].default

    def tensor(self, role: str) -> TensorFacts | None:
        value = self.get(role)
        return value if isinstance(value, TensorFacts) else None

    def number(self, role: str) -> float | None:
        value = self.get(role)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def whole(self, role: str) -> int | None:
        """A whole number; of a tensor of one known value that value (``block_size`` is documented as a tensor)."""
        value = self.get(role)
        if isinstance(value, TensorFacts) and value.values is not None and len(value.values) == 1:
            return value.values[0]
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def phase(self) -> str:
        return self.context.phase

    @property
    def attention(self) -> bool:
        return self.operator.family in ATTENTION

    # ----------------------------------------------------------------------------------------------------- layout

    @cached_property
    def layout(self) -> str:
        """As passed, by default, or fixed; of a write as the context says."""
        given = self.get("layout")
        return str(given) if given is not None else self.operator.layout or self.context.layout

    @property
    def layout_in(self) -> str:
        """The part ahead of the underscore: that of the inputs. ``NTD_TND`` → ``NTD``."""
        return self.layout.split("_")[0]

    @property
    def axes(self) -> str:
        return AXES.get(self.layout_in, "")

    @property
    def packed(self) -> bool:
        """All tokens of all sequences in one axis."""
        return self.layout_in in ("TND", "NTD")

    def axis(self, tensor: TensorFacts | None, letter: str) -> int | None:
        """Size of an axis of a tensor in the input layout, if its rank fits."""
        if tensor is None or letter not in self.axes or len(tensor.shape) != len(self.axes):
            return None
        return tensor.shape[self.axes.index(letter)]

    @cached_property
    def query(self) -> TensorFacts | None:
        return self.tensor("query")

    @cached_property
    def key(self) -> TensorFacts | None:
        return self.tensor("key")

    @cached_property
    def value(self) -> TensorFacts | None:
        return self.tensor("value")

    @cached_property
    def heads(self) -> int | None:
        """Query heads as passed or by default; one rank's."""
        return self.whole("heads")

    @cached_property
    def kv_heads(self) -> int | None:
        """Key heads as passed; 0 stands for as many as the query has."""
        return self.whole("kv_heads") or self.heads

    @cached_property
    def head_dim(self) -> int | None:
        """Of the query, by its layout; for ``BSH`` with the heads that were passed."""
        found = self.axis(self.query, "D")
        if found is not None:
            return found
        joint = self.axis(self.query, "H")
        if joint is not None and self.heads and self.passed("heads"):
            return joint // self.heads if joint % self.heads == 0 else None
        flat = self.query
        if self.operator.layout == "TND" and flat is not None and len(flat.shape) == 2 and self.heads:
            return flat.shape[1] // self.heads if flat.shape[1] % self.heads == 0 else None
        return None

    # ---------------------------------------------------------------------------------------------------- lengths

    def lengths(self, role: str) -> Lengths:
        value = self.get(role)
        if value is None:
            return Lengths(False, None)
        if isinstance(value, TensorFacts):
            return Lengths(True, value.values)
        values = value if isinstance(value, tuple) else (value,)
        return Lengths(True, tuple(values) if all(isinstance(one, int) for one in values) else None)

    @property
    def tokens(self) -> int | None:
        """Packed tokens of the query."""
        if self.operator.layout == "TND":
            return self.query.shape[0] if self.query is not None and self.query.shape else None
        return self.axis(self.query, "T")

    @cached_property
    def batch(self) -> int | None:
        """Number of sequences."""
        if self.operator.family == "atb_paged" and not self.has("q_lengths"):
            return self.tokens  # one query each
        if self.packed:
            values = self.lengths("q_lengths").values
            return self.context.batch if values is None else len(values)
        return self.axis(self.query, "B") or self.context.batch

    @property
    def ends(self) -> bool:
        """Whether lengths of the query must be cumulative."""
        return self.packed and not self.operator.layout

    @property
    def kv_ends(self) -> bool:
        """Whether lengths of the keys must be cumulative: packed keys, not those of a cache."""
        return self.ends and not self.paged

    @cached_property
    def q_each(self) -> tuple[int, ...] | None:
        """Queries of each sequence as the arguments say; ``None`` if they do not, or cannot be read."""
        if self.operator.family == "atb_paged" and not self.has("q_lengths"):
            return None if self.tokens is None else (1,) * self.tokens
        found = _each(self.lengths("q_lengths"), self.ends, self.batch)
        if found is None and not self.packed and not self.lengths("q_lengths").given:
            size = self.axis(self.query, "S")
            found = None if size is None or self.batch is None else (size,) * self.batch
        if found is None and self.context.q_len is not None:
            return (self.context.q_len,) * (self.context.batch or 1)
        return found

    @cached_property
    def kv_each(self) -> tuple[int, ...] | None:
        """Keys of each sequence as the arguments say."""
        if self.operator.family == "atb_prefill":
            return self.q_each
        found = _each(self.lengths("kv_lengths"), self.kv_ends, self.batch)
        if found is None and not self.packed and not self.paged and not self.lengths("kv_lengths").given:
            size = self.axis(self.key, "S")
            found = None if size is None or self.batch is None else (size,) * self.batch
        if found is None and self.context.kv_len is not None:
            return (self.context.kv_len,) * (self.context.batch or 1)
        return found

    @property
    def token_rows(self) -> bool:
        """Whether each token of the step is handed over as a sequence of its own, with one query.

        dlinfer's attention over a paged history does that (``paged_prefill_attention``): rows of the block table and
        lengths are repeated for each token, and its row of the mask hides what comes after it.
        """
        known = self.context.q_lens
        return known is not None and sum(known) > len(known) and self.q_each == (1,) * sum(known)

    @property
    def longest_q(self) -> int | None:
        return max(self.q_each) if self.q_each else None

    @property
    def longest_kv(self) -> int | None:
        return max(self.kv_each) if self.kv_each else None

    @property
    def single(self) -> bool | None:
        """Whether each sequence has one query."""
        return None if self.longest_q is None else self.longest_q <= 1

    # ------------------------------------------------------------------------------------------------------ paged

    @property
    def paged(self) -> bool:
        return self.passed("table")

    @property
    def table(self) -> TensorFacts | None:
        return self.tensor("table")

    @cached_property
    def block(self) -> int | None:
        """Tokens of a block: as passed, else of a cache ``[blocks, size, heads, dim]``."""
        if self.has("block_size"):
            return self.whole("block_size") or None
        return self.key.shape[1] if self.key is not None and len(self.key.shape) == 4 else None

    @property
    def reach(self) -> int | None:
        """Tokens that a row of the block table has room for."""
        if self.table is None or len(self.table.shape) != 2 or not self.block:
            return None
        return self.table.shape[1] * self.block

    def table_rows(self) -> tuple[tuple[int, ...], ...] | None:
        if self.table is None or self.table.values is None or len(self.table.shape) != 2:
            return None
        width = self.table.shape[1]
        return tuple(self.table.values[i * width : (i + 1) * width] for i in range(self.table.shape[0]))

    def used_rows(self) -> tuple[tuple[int, ...], ...] | None:
        """Of each sequence the blocks that its length reaches; ``None`` if tables or lengths are unknown."""
        rows, each = self.table_rows(), self.kv_each
        if rows is None or each is None or not self.block or len(rows) < len(each):
            return None
        return tuple(row[: -(-length // self.block)] for row, length in zip(rows, each, strict=False) if length >= 0)

    # ----------------------------------------------------------------------------------------------- mask and path

    @property
    def mode(self) -> int | None:
        return self.whole("mode")

    @property
    def mask(self) -> TensorFacts | None:
        return self.tensor("mask")

    @property
    def masking(self) -> MaskFacts | None:
        return None if self.mask is None else self.mask.mask

    @property
    def has_rope(self) -> bool:
        return self.passed("query_rope")

    @property
    def absorbed(self) -> bool:
        """Latent attention over the latent cache: rope apart and a query as wide as the latent."""
        return self.path == "mla_absorb"

    @cached_property
    def path(self) -> str:
        """As the context says; otherwise what the arguments show."""
        if self.context.path:
            return self.context.path
        if self.has_rope:
            return "mla_absorb" if self.head_dim == LATENT else "mla"
        if self.context.causal is False:
            return "noncausal"
        if self.context.window or self.mode == 4:
            return "sliding"
        return "unified" if self.packed and self.paged else ""

    @property
    def partial(self) -> bool:
        """The result is one part of an attention, merged by its log-sum-exp."""
        return self.get("lse") is True

    @property
    def causal(self) -> bool | None:
        """Whether later tokens must be hidden: as the context says; a part of an attention need not."""
        if self.path == "noncausal":
            return False
        return None if self.partial else self.context.causal


def _each(lengths: Lengths, ends: bool, batch: int | None) -> tuple[int, ...] | None:
    """Length of each sequence from the argument."""
    if lengths.values is None:
        return None
    if ends:
        return differences(lengths.values)
    if len(lengths.values) == 1 and batch:
        return lengths.values * batch
    return lengths.values if batch is None else lengths.values[:batch]


def differences(ends: Sequence[int]) -> tuple[int, ...]:
    """``(2, 5, 9)`` → ``(2, 3, 4)``."""
    return tuple(end - start for start, end in zip((0, *ends), ends, strict=False))


def elements(shape: Sequence[int]) -> int:
    return prod(shape)
