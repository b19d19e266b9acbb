"""Which functions of this process talk to other ranks, with the lines at which they really stand: what to read when a
collective is wrong. Patches of a vendor are found where they are defined, whatever they replace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from adapters.probe.callsite import definition

#: Names of calls that reach other ranks, by torch.distributed and by the engines' wrappers of it.
CALLS = frozenset(
    (
        "all_reduce", "all_gather", "all_gather_into_tensor", "all_gatherv", "gather", "scatter", "broadcast",
        "reduce_scatter", "reduce_scatter_tensor", "reduce_scatterv", "all_to_all", "all_to_all_single",
        "tensor_model_parallel_all_reduce", "tensor_model_parallel_all_gather",
    )
)  # fmt: skip
#: Of these the names that tensors have methods of: they count beside a module of torch.distributed.
_AMBIGUOUS = frozenset(("gather", "scatter", "broadcast"))
_DISTRIBUTED = frozenset(("dist", "distributed"))
#: That are told.
LISTED = 12


def talking(prefixes: Iterable[str]) -> list[str]:
    """``file:line name`` of every function in the loaded modules below ``prefixes`` that calls a collective."""
    begin = tuple(prefixes)
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith(begin) and module is not None]
    found = [
        f"{definition(function)} {name}" for module in modules for name, function in _own(module) if _talks(function)
    ]
    return list(dict.fromkeys(found))[:LISTED]


def _own(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    """Functions that a module defines itself, those of its classes included."""
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, type):
            for inner, method in list(vars(value).items()):
                function = getattr(method, "__func__", method)
                if isinstance(function, FunctionType):
                    yield f"{name}.{inner}", function
        elif isinstance(function := getattr(value, "__func__", value), FunctionType):
            yield name, function


def _talks(function: Any) -> bool:
    used = frozenset(_names(function.__code__)) & (CALLS | _DISTRIBUTED)
    return bool(used & (CALLS - _AMBIGUOUS)) or bool(used & _AMBIGUOUS and used & _DISTRIBUTED)


def _names(code: CodeType) -> Iterator[str]:
    """Every global and attribute that a function and the functions inside it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
