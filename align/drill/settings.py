"""What engines are launched with for trials: everything but the fault."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from align.case.schema import Batch, Case, CaseLayout, CaseRequest, Dtype, Numerics
from align.drill.library import Engine
from align.errors import UserError
from align.models.info import ModelInfo

NumericsOf = tuple[Literal["native", "fp32-internal"], Literal["native", "fp32-internal"]]
#: Of a launch whose engines take the requests of any batch.
ANY = "any"
#: Two sides that round differently, as two engines on hardware do.
DIFFERENT: NumericsOf = ("native", "fp32-internal")


class BatchRequest(BaseModel):
    """A request of a batch; lengths in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    prompt: int = Field(ge=1)
    new: int = Field(ge=1)
    arrival: int = Field(default=0, ge=0)


class NamedBatch(BaseModel):
    """One table of ``batches.toml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    why: str
    requests: tuple[BatchRequest, ...] = Field(min_length=1)


@lru_cache(maxsize=1)
def batches() -> dict[str, NamedBatch]:
    """Name → batch."""
    text = (Path(__file__).parent / "batches.toml").read_text(encoding="utf-8")
    return {name: NamedBatch.model_validate(table) for name, table in tomllib.loads(text).items()}


@dataclass(frozen=True)
class Setting:
    """A launch of both engines.

    Attributes:
        batch: name of the requests; :data:`ANY` for a launch that all of them fit in.
        tp, dp: ranks of a group, and groups.
        reference_tp: of the reference, where it has another.
        numerics: of the simulated operators, candidate and reference; without meaning on hardware.
        options: engine → options, on whichever side it is.
        allow: conditions that the options make false.
        live: patches are changed in engines that are up; otherwise each trial launches its own.
    """

    model: str = "qwen3"
    batch: str = "plain"
    dtype: Dtype = "bfloat16"
    block_size: int = 128
    tp: int = 1
    numerics: NumericsOf = DIFFERENT
    options: tuple[tuple[str, tuple[str, ...]], ...] = field(default=())
    allow: tuple[str, ...] = ()
    live: bool = True
    dp: int = 1
    reference_tp: int | None = None

    @property
    def name(self) -> str:
        """Short, unique for what differs."""
        words = [self.model, self.batch, self.dtype, f"block{self.block_size}", f"tp{self.tp}", *self.numerics]
        words += [f"dp{self.dp}"] * (self.dp > 1) + [f"against-tp{self.reference_tp}"] * (self.reference_tp is not None)
        return "-".join([*words, *(text for _, texts in self.options for text in texts), *self.allow])

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def requests_of(batch: str, vocab: int) -> tuple[CaseRequest, ...]:
    """The requests of a batch; ids below ``min(vocab, 900)``, never special, no prompt the beginning of another.

    Those of :data:`ANY` are as many and as long as in any batch: none of them needs more than they do.

    Raises:
        UserError: there is no such batch.
    """
    if batch not in batches() and batch != ANY:
        raise UserError(f"no batch {batch!r}", f"use one of: {', '.join(batches())}")
    span = min(vocab, 900) - 3
    return tuple(
        CaseRequest(
            name=one.name,
            token_ids=tuple((7 * number + 11 * at + at * at * number) % span + 3 for at in range(one.prompt)),
            max_new_tokens=one.new,
            arrival=one.arrival,
        )
        for number, one in enumerate(_bounding() if batch == ANY else batches()[batch].requests, start=1)
    )


def _bounding() -> tuple[BatchRequest, ...]:
    every = [one.requests for one in batches().values()]
    prompt, new = (max(getattr(one, name) for requests in every for one in requests) for name in ("prompt", "new"))
    return tuple(BatchRequest(name=f"r{at}", prompt=prompt, new=new) for at in range(max(map(len, every))))


def case_of(setting: Setting, info: ModelInfo, engines: tuple[Engine, Engine]) -> Case:
    """The case of a setting.

    Args:
        engines: candidate and reference.

    Raises:
        UserError: the model cannot run it.
    """
    case = Case(
        model=info.name if info.preset else str(info.path),
        dtype=setting.dtype,
        candidate=engines[0],
        reference=engines[1],
        layout=CaseLayout(tp=setting.tp, dp=setting.dp),
        reference_layout=None if setting.reference_tp is None else CaseLayout(tp=setting.reference_tp, dp=setting.dp),
        batch=Batch(block_size=setting.block_size),
        numerics=Numerics(candidate=setting.numerics[0], reference=setting.numerics[1]),
        requests=requests_of(setting.batch, info.vocab_size),
    )
    case.check(info)
    return case
