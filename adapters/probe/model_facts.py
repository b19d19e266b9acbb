"""Facts that are read alike from every engine's modules and tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from adapters.probe.live import one_or_all

#: Elements of a cache that are looked at in one go; a device may have no room for a mask of the whole cache.
_CHUNK = 1 << 26
#: Positions of a rotary table that are looked at.
ROPE_POSITIONS = 2048
#: Part of a rotary class's name → the type as configurations spell it; the first that fits.
_ROPE_TYPES = (
    ("llama3", "llama3"),
    ("yarn", "yarn"),
    ("deepseekscaling", "yarn"),
    ("longrope", "longrope"),
    ("dynamic", "dynamic"),
    ("linear", "linear"),
    ("mrotary", "mrope"),
)


#: The order of experts that both engines give the ranks: the first rank the first ones, and so on.
IN_A_ROW = "in a row by rank"


def placed(layers: Iterable[list[int]], rank: int) -> Any:
    """Which experts a rank holds, if all layers are alike; else of each.

    Args:
        layers: global ids in the order in which the rank keeps them.
        rank: its place among the ranks that share the experts; 0 if they do not.
    """
    found = [_placed(held, rank) for held in layers]
    return found[0] if found and all(one == found[0] for one in found) else found or None


def _placed(held: list[int], rank: int) -> dict[str, Any]:
    count = len(held)
    ordered = held == list(range(rank * count, (rank + 1) * count))
    return {"per_rank": count, "order": IN_A_ROW if ordered else held}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parameter_dtypes(model: torch.nn.Module) -> Any:
    """The dtype of all parameters, or the list of distinct ones."""
    return one_or_all(dtype_name(parameter.dtype) for parameter in model.parameters())


def named(model: torch.nn.Module, part: str) -> list[Any]:
    """Modules whose class is called like ``part``, in order."""
    return [module for module in model.modules() if part in type(module).__name__]


def unlike(model: torch.nn.Module, values: Iterable[tuple[Any, Any]]) -> list[list[Any]]:
    """Where a value is not what most modules have.

    Args:
        values: ``(module, value)``.

    Returns:
        ``[name of the module, value]`` in the model's order; empty if all have the same.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found = [(names.get(id(module), ""), value) for module, value in values]
    if not found:
        return []
    common, _ = Counter(value for _, value in found).most_common(1)[0]
    return [[name, value] for name, value in found if value != common]


def same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two weights are one piece of memory."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def tied_head(model: torch.nn.Module, embedding: torch.Tensor) -> bool:
    """Whether the head shares the embedding's weight ``[vocab, hidden]``.

    A model without ``lm_head`` (vLLM's Gemma 2) can only read its embedding, if no other module is a table of words.

    Raises:
        LookupError: there is such a module.
    """
    head = getattr(model, "lm_head", None)
    if head is not None:
        return same_storage(head.weight, embedding)
    tables = [one for part in ("Head", "Embedding") for one in named(model, part) if hasattr(one, "weight")]
    others = [type(one).__name__ for one in tables if not same_storage(one.weight, embedding)]
    if others:
        raise LookupError(f"there is no lm_head, and a {others[0]} beside the embedding")
    return True


def rope_type(module: torch.nn.Module, factor: float = 1.0) -> str:
    """The kind of rotary embedding, by the class that computes it; a plain one with a factor is ``linear``."""
    name = type(module).__name__.lower()
    found = next((kind for part, kind in _ROPE_TYPES if part in name), None)
    return found or ("default" if factor == 1.0 else "linear")


def flat_caches(caches: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors of a cache, which engines keep as one or as tuples per layer."""
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            yield cache
        elif cache is not None:
            yield from flat_caches(cache)


def residue(caches: Iterable[Any]) -> dict[str, int]:
    """What is left in a KV cache: non-zero elements, blocks that hold any, and all blocks of all tensors.

    Args:
        caches: tensors ``[num_blocks, …]``, in tuples or not. NaN counts as non-zero.
    """
    elements = blocks = total = 0
    for cache in flat_caches(caches):
        total += cache.shape[0]
        rows = max(1, _CHUNK // max(1, cache[0].numel()))
        for start in range(0, cache.shape[0], rows):
            per_block = (cache[start : start + rows] != 0).flatten(1).sum(1)
            elements += int(per_block.sum())
            blocks += int((per_block != 0).sum())
    return {"elements": elements, "blocks": blocks, "of_blocks": total}


def dummy_forwards(directory: Path, rank: int) -> int:
    """Forwards without requests that this rank logged so far."""
    path = directory / f"steps-rank{rank}.jsonl"
    if not path.exists():
        return 0
    with path.open(encoding="utf-8") as lines:
        return sum('"event": "dummy"' in line for line in lines)


def measured_frequencies(cos: torch.Tensor, sin: torch.Tensor) -> dict[str, Any]:
    """Inverse frequencies that a table of cosines and sines really holds, ``[positions, rotary_dim / 2]`` each.

    The angle at position 1 gives a first estimate; positions 2, 4, 8, … refine it, because an error of the angle is
    divided by the position. Rounding cosine and sine moves an angle θ by at most ε·|sin 2θ|, with ε the unit roundoff
    of the table's dtype: less than 2ε·θ, and less than ε.

    Returns:
        ``inv_freq`` and ``resolution`` (relative error of each, from the table's rounding), in order of the channels;
        ``scale``: the length of the rotated vector, 1 for a plain rotation; ``positions``: how many were looked at.
    """
    assert cos.shape == sin.shape and cos.ndim == 2, (cos.shape, sin.shape)
    roundoff = torch.finfo(cos.dtype).eps / 2
    x, y = cos.detach().double().cpu(), sin.detach().double().cpu()
    angle = torch.atan2(y[1], x[1])
    frequency = torch.where(angle < 0, angle + 2 * math.pi, angle)
    reach, position = 1, 2
    while position < x.shape[0]:
        angle = torch.atan2(y[position], x[position])
        turns = torch.round((position * frequency - angle) / (2 * math.pi))
        frequency = (turns * 2 * math.pi + angle) / position
        reach, position = position, 2 * position
    # Angles in float32 lose 2⁻²⁴ of themselves, once for the frequency and once for the product.
    relative = (2 * roundoff / (reach * frequency.abs()).clamp(min=1.0)) + 2**-23
    return {
        "inv_freq": frequency.tolist(),
        "resolution": relative.tolist(),
        "scale": float(torch.hypot(x[0], y[0]).mean()),
        "positions": int(x.shape[0]),
    }
