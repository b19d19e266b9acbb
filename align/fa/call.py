"""One call of an attention or cache operator, as plain facts: what the rules look at.

A call is described where it happens, from live tensors (:mod:`align.fa.describe`), or written by hand as JSON. Both
give the same :class:`Call`, and :func:`call_record` and :func:`read_call` carry it through JSON. What a description
does not say is ``None`` and makes a rule that needs it *not observable*, never passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

#: Version of the JSON form.
SCHEMA = 1

#: Kinds of steps; empty where the caller did not say.
PHASES = ("prefill", "decode", "mixed")
#: Ways of attention that allow different arguments (seed 001, table F.1). Empty: unknown.
PATHS = (
    "unified",  # one configuration for prefill and decode: packed tokens over a paged cache
    "sliding",  # a layer with a window
    "mla",  # latent attention with keys and values per head
    "mla_absorb",  # latent attention over the latent cache
    "noncausal",  # every query may see every key: encoders
)

#: What a mask hides; rows are queries, columns are keys, a value other than 0 hides.
MASK_PATTERNS = (
    "causal",  # exactly what lies above the main diagonal
    "causal right",  # the same, with the diagonal at the right end of a mask that is wider than high
    "causal and diagonal",  # also the diagonal: a query does not see itself
    "past",  # exactly what lies below the main diagonal: a causal mask transposed
    "past and diagonal",  # what a causal mask shows: its values have the opposite meaning
    "all",
    "none",
    "other",
)


@dataclass(frozen=True)
class MaskFacts:
    """What a mask hides.

    Attributes:
        pattern: one of :data:`MASK_PATTERNS`.
        upper_open: places above the main diagonal that are visible, over all matrices of the mask.
        lower_hidden: places on and below the main diagonal that are hidden.
        first_open: of each row the first visible column, or the width if the row is hidden whole; rows of all matrices
            one after the other. Empty if every row sees the first column, ``None`` where rows are too many to keep.
        digest: of what is hidden, independent of the dtype; empty if it was not computed.
        visible: of a mask of another pattern, of each row how many columns it shows, if these are its first ones in all
            rows; otherwise ``None``.
    """

    pattern: str
    upper_open: int = 0
    lower_hidden: int = 0
    first_open: tuple[int, ...] | None = None
    digest: str = ""
    visible: tuple[int, ...] | None = None

    def __hash__(self) -> int:  # without the rows, which are many
        return hash((self.pattern, self.upper_open, self.lower_hidden, self.digest))


@dataclass(frozen=True)
class TensorFacts:
    """What a rule may know about a tensor.

    Attributes:
        shape: sizes of the axes.
        dtype: without ``torch.``.
        device: ``npu``, ``cpu``, …, without an index; empty if unknown.
        contiguous: ``None`` if unknown.
        format: ``ND`` or ``NZ``; empty if unknown.
        memory: tensors of one call with equal numbers begin at the same address; ``None`` if unknown.
        values: of a small tensor of integers, one after the other; ``None`` if they were not read.
        low, high: smallest and largest value of a tensor of integers that is too large for ``values``.
        nonfinite: how many values are NaN or infinite; ``None`` if nobody looked.
        mask: what it hides, if it is a mask that was looked at.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str = ""
    contiguous: bool | None = None
    format: str = ""
    memory: int | None = None
    values: tuple[int, ...] | None = None
    low: int | None = None
    high: int | None = None
    nonfinite: int | None = None
    mask: MaskFacts | None = None


#: What an argument may be.
Value = TensorFacts | int | float | bool | str | None | tuple[Any, ...]


@dataclass(frozen=True)
class Context:
    """What the caller knows beyond the arguments: the step, the layer and the model. All of it may be unknown.

    Attributes:
        phase: one of :data:`PHASES`, from the step, not guessed.
        layer: number of the decoder layer.
        path: one of :data:`PATHS`.
        causal: whether a token must not see later ones.
        window: keys that a query sees, itself included; 0 for all.
        next_n: tokens that are drafted ahead, 0 without speculative decoding.
        q_lens, kv_lens: tokens of each sequence in this step and after it, from the step's own bookkeeping.
        batch, q_len, kv_len: number of sequences and longest lengths, where only these are known.
        layout: of a cache that is written without a layout argument.
        scale, eps: softmax scale and norm epsilon that the model's configuration asks for.
        head_dim, heads, kv_heads: of the whole model; kv_heads are repeated where there are more ranks than heads.
        ranks: tensor-parallel size of attention.
        dtype, device: that the model computes in and on.
    """

    phase: str = ""
    layer: int | None = None
    path: str = ""
    causal: bool | None = None
    window: int | None = None
    next_n: int | None = None
    q_lens: tuple[int, ...] | None = None
    kv_lens: tuple[int, ...] | None = None
    batch: int | None = None
    q_len: int | None = None
    kv_len: int | None = None
    layout: str = ""
    scale: float | None = None
    eps: float | None = None
    head_dim: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ranks: int | None = None
    dtype: str = ""
    device: str = ""

    def __post_init__(self) -> None:
        if self.phase not in ("", *PHASES):
            raise ValueError(f"phase {self.phase!r} is none of {', '.join(PHASES)}")
        if self.path not in ("", *PATHS):
            raise ValueError(f"path {self.path!r} is none of {', '.join(PATHS)}")
        for name in ("q_lens", "kv_lens"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, tuple(int(one) for one in given))


@dataclass(frozen=True)
class Call:
    """One call: operator as it was named, the arguments that were passed (and no others), and what else is known."""

    operator: str
    arguments: Mapping[str, Value]
    context: Context = field(default_factory=Context)

    def key(self) -> tuple[Any, ...]:
        """Equal for calls that all rules judge alike: everything but the layer."""
        known = tuple(getattr(self.context, one.name) for one in fields(self.context) if one.name != "layer")
        return (self.operator, tuple(sorted(self.arguments.items(), key=lambda item: item[0])), known)


# ---------------------------------------------------------------------------------------------------- JSON


def call_record(call: Call) -> dict[str, Any]:
    """The call for JSON: what has its default is left out."""
    return {
        "schema": SCHEMA,
        "operator": call.operator,
        "arguments": {name: _plain(value) for name, value in call.arguments.items()},
        "context": _changed(call.context),
    }


def _plain(value: Value) -> Any:
    if isinstance(value, TensorFacts):
        return {"tensor": _changed(value)}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _changed(facts: Any) -> dict[str, Any]:
    record = {}
    for one in fields(facts):
        value = getattr(facts, one.name)
        if one.default is value or (one.default == value and type(one.default) is type(value)):
            continue
        record[one.name] = _changed(value) if isinstance(value, MaskFacts) else _listed(value)
    return record


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def read_call(record: Mapping[str, Any]) -> Call:
    """The call that :func:`call_record` wrote.

    Raises:
        ValueError: it is none, or of another version.
    """
    if record.get("schema", SCHEMA) != SCHEMA:
        raise ValueError(f"schema {record.get('schema')!r} is not {SCHEMA}")
    operator, given = record.get("operator"), record.get("arguments")
    if not isinstance(operator, str) or not isinstance(given, Mapping):
        raise ValueError("a call has an operator and arguments")
    arguments = {str(name): _value(f"arguments.{name}", value) for name, value in given.items()}
    context = record.get("context", {})
    if not isinstance(context, Mapping):
        raise ValueError("context is no object")
    return Call(operator, arguments, Context(**_known("context", context, Context)))


def _value(where: str, value: Any) -> Value:
    if isinstance(value, Mapping):
        if set(value) != {"tensor"} or not isinstance(value["tensor"], Mapping):
            raise ValueError(f"{where}: an object must be {{'tensor': …}}")
        return tensor_facts(where, value["tensor"])
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_value(where, one) for one in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{where}: {value!r} is no tensor, number, text or list")


def tensor_facts(where: str, record: Mapping[str, Any]) -> TensorFacts:
    """One tensor of a record.

    Raises:
        ValueError: a name that there is not, or one that is missing.
    """
    known = _known(where, record, TensorFacts)
    mask = known.get("mask")
    if isinstance(mask, Mapping):
        known["mask"] = MaskFacts(**_known(f"{where}.mask", mask, MaskFacts))
    try:
        return TensorFacts(**known)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def _known(where: str, record: Mapping[str, Any], kind: type) -> dict[str, Any]:
    names = _names(kind)
    strange = sorted(set(record) - set(names))
    if strange:
        raise ValueError(f"{where}: there is no {', '.join(strange)}; there are {', '.join(names)}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}


def _names(kind: Any) -> Iterable[str]:
    return [one.name for one in fields(kind)]
