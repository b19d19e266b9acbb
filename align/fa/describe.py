"""A call from live arguments. Needs torch alone, and reads no more of a tensor than the rules look at."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from align.fa.call import Call, Context, MaskFacts, TensorFacts, Value
from align.fa.masks import mask_facts
from align.fa.operators import Operator, resolve

#: Integers of one tensor that a description keeps; of larger ones the smallest and the largest.
MOST_VALUES = 4096
#: Format numbers of ``torch_npu.get_npu_format``.
_FORMATS = {2: "ND", 29: "NZ"}
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.uint8, torch.int8)


class Describer:
    """Describes calls; keeps what it has seen of masks, which are large and are used again in every layer and step.

    Attributes:
        finite: also count NaN and infinite values of queries, keys, values and what is written. Reads all of them.
        content: look at masks. Costs tens of milliseconds for a new one of 2048 x 2048.
    """

    def __init__(self, finite: bool = False, content: bool = True) -> None:
        self.finite, self.content = finite, content
        self._masks: dict[int, tuple[Any, tuple[Any, ...], MaskFacts]] = {}

    def describe(
        self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], context: Context | None = None
    ) -> Call:
        """The call ``operator(*args, **kwargs)``.

        Args:
            operator: name or function, in any spelling of :func:`align.fa.operators.resolve`.
            args, kwargs: as the operator gets them.
            context: what else is known.

        Raises:
            ValueError: no such operator, or more positional arguments than it has.
        """
        found = resolve(operator if isinstance(operator, str) else _name(operator))
        given = _bound(found, args, kwargs)
        memory: dict[int, int] = {}
        arguments = {name: self._value(found, name, value, memory) for name, value in given.items()}
        return Call(found.name, arguments, context or Context())

    def _value(self, operator: Operator, name: str, value: Any, memory: dict[int, int]) -> Value:
        if isinstance(value, torch.Tensor):
            return self._tensor(operator, name, value, memory)
        if isinstance(value, (list, tuple)):
            return tuple(self._value(operator, name, one, memory) for one in value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if hasattr(value, "__index__"):  # a symbolic integer
            return int(value)
        return str(value)

    def _tensor(self, operator: Operator, name: str, tensor: torch.Tensor, memory: dict[int, int]) -> TensorFacts:
        values, low, high, mask, nonfinite = None, None, None, None, None
        is_mask = name == operator.roles.get("mask")
        if is_mask and self.content and tensor.dim() >= 2 and tensor.numel():
            mask = self._mask(tensor)
        elif tensor.dtype in _INTEGERS and name in _READ and tensor.numel():
            if tensor.numel() <= MOST_VALUES:
                values = tuple(tensor.detach().reshape(-1).tolist())
            else:
                low, high = (int(one) for one in torch.aminmax(tensor.detach()))
        elif self.finite and tensor.is_floating_point() and name in _COMPUTED:
            nonfinite = int((~torch.isfinite(tensor.detach())).sum())
        return TensorFacts(
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).rpartition(".")[2],
            device=tensor.device.type,
            contiguous=tensor.is_contiguous(),
            format=_format(tensor),
            memory=memory.setdefault(tensor.data_ptr(), len(memory)) if tensor.numel() else None,
            values=values,
            low=low,
            high=high,
            nonfinite=nonfinite,
            mask=mask,
        )

    def _mask(self, tensor: torch.Tensor) -> MaskFacts:
        """Of a mask that was seen and not written since, what was found then."""
        state = (tensor.data_ptr(), getattr(tensor, "_version", 0) if not tensor.is_inference() else 0)
        kept = self._masks.get(id(tensor))
        if kept is not None and kept[0]() is tensor and kept[1] == state:
            return kept[2]
        facts = mask_facts(tensor)
        self._masks = {key: one for key, one in self._masks.items() if one[0]() is not None}
        self._masks[id(tensor)] = (weakref.ref(tensor), state, facts)
        return facts


#: Arguments whose integers are read: lengths, tables and places to write to.
_READ = {
    "actual_seq_lengths", "actual_seq_lengths_kv", "actual_seq_qlen", "actual_seq_kvlen", "actual_shared_prefix_len",
    "seq_len", "context_lens", "block_table", "slot_mapping", "slot_indices", "indices", "index", "block_size",
}  # fmt: skip
#: Arguments that are computed with.
_COMPUTED = {"query", "key", "value", "query_rope", "key_rope", "updates", "kv"}


def _bound(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = list(operator.arguments)
    if len(args) > len(names):
        raise ValueError(f"{operator.name} has {len(names)} arguments, {len(args)} were given by position")
    given = dict(zip(names, args, strict=False))
    twice = sorted(set(given) & set(kwargs))
    if twice:
        raise ValueError(f"{operator.name} got {', '.join(twice)} twice")
    return {**given, **kwargs}


def _name(operator: Any) -> str:
    """Of a function, an ``OpOverload`` or an ``OpOverloadPacket``."""
    return str(getattr(operator, "__qualname__", "") or operator) if not hasattr(operator, "_schema") else str(operator)


def _format(tensor: torch.Tensor) -> str:
    """Of a tensor on an NPU; asked of the module that is loaded, which this one never imports."""
    if tensor.device.type != "npu":
        return ""
    import sys

    ask = getattr(sys.modules.get("torch_npu"), "get_npu_format", None)
    return "" if ask is None else _FORMATS.get(int(ask(tensor)), "ND")
