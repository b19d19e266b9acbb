"""The short form of a tensor in descriptions by hand: ``bf16[8,4,128]``, ``int32[3]=[2,5,8]``, ``bool[9,9]=causal``.

``bool[2,9]=shows [8,9]`` is a mask whose rows show that many columns, the first ones.

After the shape may follow, in this order, ``@npu``, ``!strided`` (not contiguous), ``/NZ``, ``#2`` (memory) and ``?3``
(NaN and infinite values). A word behind ``=`` is a pattern of :data:`align.fa.call.MASK_PATTERNS`, or ``range``: from
1 on.
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import prod

import torch

from align.fa.call import MASK_PATTERNS, MaskFacts, TensorFacts
from align.fa.masks import mask_facts

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_FORM = re.compile(
    r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,\s]*)\](?:@(?P<device>\w+))?(?P<strided>!strided)?(?:/(?P<format>\w+))?"
    r"(?:#(?P<memory>\d+))?(?:\?(?P<nonfinite>\d+))?(?:\s*=\s*(?P<content>.+))?"
)


def parse_tensor(text: str) -> TensorFacts:
    """The facts that a short form states.

    Raises:
        ValueError: it is no such form, or its values do not fit its shape.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no tensor; write one as bf16[8,4,128] or int32[3]=[2,5,8]")
    shape = tuple(int(size) for size in found["shape"].split(",") if size.strip())
    content = found["content"]
    values, mask = None, None
    count = prod(shape)
    if content is not None and content.startswith("shows ") and len(shape) >= 2:
        counts = torch.tensor([int(one) for one in re.findall(r"\d+", content)])
        if counts.numel() * shape[-1] != count:
            raise ValueError(f"{text!r} shows {counts.numel()} rows, its shape has {count // max(shape[-1], 1)}")
        mask = mask_facts((torch.arange(shape[-1]) >= counts[:, None]).reshape(shape))
    elif content == "range":
        values = tuple(range(1, count + 1))
    elif content is not None and not content.startswith("["):
        if content not in MASK_PATTERNS or len(shape) < 2:
            raise ValueError(f"{text!r}: {content!r} is no list of integers and no pattern of a mask")
        mask = _mask(shape, content)
    elif content is not None:
        try:
            values = tuple(int(one) for one in re.sub(r"[\[\]\s]", "", content).split(",") if one)
        except ValueError:
            raise ValueError(f"{text!r}: {content} is no list of integers") from None
        if count != len(values):
            raise ValueError(f"{text!r} has {len(values)} values for a shape of {count}")
    return TensorFacts(
        shape,
        DTYPES.get(found["dtype"], found["dtype"]),
        device=found["device"] or "",
        contiguous=False if found["strided"] else None,
        format=found["format"] or "",
        memory=int(found["memory"]) if found["memory"] else None,
        values=values,
        nonfinite=int(found["nonfinite"]) if found["nonfinite"] else None,
        mask=mask,
    )


@lru_cache(maxsize=64)
def _mask(shape: tuple[int, ...], pattern: str) -> MaskFacts:
    """Facts of a mask that hides in a pattern."""
    rows, columns = shape[-2:]
    place = torch.arange(columns) - torch.arange(rows)[:, None]
    hides = {
        "causal": lambda: place > 0,
        "causal right": lambda: place > columns - rows,
        "causal and diagonal": lambda: place >= 0,
        "past": lambda: place < 0,
        "past and diagonal": lambda: place <= 0,
        "all": lambda: torch.ones_like(place, dtype=torch.bool),
        "none": lambda: torch.zeros_like(place, dtype=torch.bool),
        "other": lambda: (place % 2) == 0,
    }
    return mask_facts(hides[pattern]().expand(shape))


def short(facts: TensorFacts) -> str:
    """``bfloat16[8,4,128]`` for messages."""
    return f"{facts.dtype}{list(facts.shape)}".replace(" ", "")
