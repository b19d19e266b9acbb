"""Executions that differ and are all right: other numerics, another order of requests, other blocks, other prompts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from align.case.schema import Case, CaseRequest, Numerics
from align.models.info import ModelInfo
from align.run.plan import SIMULATED

DEFAULT_RUNS = 4
#: Engine step before which the late request is admitted.
_LATE = 3
_MIXED = (
    Numerics(candidate="native", reference="fp32-internal"),
    Numerics(candidate="fp32-internal", reference="native"),
)


@dataclass(frozen=True)
class Variant:
    """One run.

    Attributes:
        name: ``run1``.
        change: how it differs, in words.
        case: what is run.
        sets, allow: options that the case does not decide, and conditions that they break, as of ``align run``.
        group: runs of one group have the same prompts and follow the first one's tokens, so that their recordings can
            be compared with each other.
    """

    name: str
    change: str
    case: Case
    group: int
    sets: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

    @property
    def numerics(self) -> dict[str, str]:
        return {side: name for side, name in self.case.numerics.model_dump().items() if name is not None}


def variants(case: Case, info: ModelInfo, count: int, device: str) -> tuple[Variant, ...]:
    """The first ``count`` of a fixed list; behind it come other prompts without end.

    Args:
        case: the model's default one.
    """
    mixed = _MIXED if device == SIMULATED else (Numerics(), Numerics())
    changes: list[tuple[str, Mapping[str, object], int]] = [("as it is", {"numerics": mixed[0]}, 0)]
    if device == SIMULATED:
        changes.append(("numerics swapped", {"numerics": mixed[1]}, 0))
    changes.append(
        (
            "requests in reverse order, the last one late",
            {"numerics": mixed[0], "requests": reordered(case.requests)},
            0,
        )
    )
    # On one side: vllm-ascend reads blocks of 128 alone, lmdeploy smaller ones too.
    half = case.batch.block_size // 2
    blocks = f"the candidate's block size {half}"
    changes.append((blocks, {"numerics": mixed[1]}, 0))
    while len(changes) < count:
        number = len(changes)
        prompts = random_prompts(case.requests, info.vocab_size, seed=number)
        changes.append((f"random prompts {number}", {"numerics": mixed[number % 2], "requests": prompts}, number))
    return tuple(
        Variant(
            f"run{index + 1}",
            change,
            case.model_copy(update=dict(update)),
            group,
            sets=(f"candidate.block_size={half}",) if change == blocks else (),
            allow=("block_size",) if change == blocks else (),
        )
        for index, (change, update, group) in enumerate(changes[:count])
    )


def reordered(requests: tuple[CaseRequest, ...]) -> tuple[CaseRequest, ...]:
    """In reverse order; the last of several is admitted when the others decode already."""
    turned = list(reversed(requests))
    if len(turned) > 1:
        turned[-1] = turned[-1].model_copy(update={"arrival": _LATE})
    return tuple(turned)


def random_prompts(requests: tuple[CaseRequest, ...], vocabulary: int, seed: int) -> tuple[CaseRequest, ...]:
    """The same lengths with ids drawn evenly from the vocabulary."""
    draw = random.Random(seed)
    return tuple(
        one.model_copy(update={"token_ids": tuple(draw.randrange(vocabulary) for _ in one.token_ids), "text": None})
        for one in requests
    )
