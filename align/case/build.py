"""A new case from a model, prompts and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from align.case.prompts import EncodedPrompt, default_prompts, encode_prompts, load_prompts
from align.case.schema import Batch, Case, CaseLayout, CaseRequest, Decoding, explain
from align.errors import UserError
from align.layout import Layout
from align.models.info import ModelInfo


@dataclass(frozen=True)
class NewCase:
    """A checked case and how its prompts came to their ids."""

    case: Case
    prompts: tuple[EncodedPrompt, ...]


def new_case(
    info: ModelInfo,
    *,
    prompts_file: Path | None = None,
    layout: Layout | None = None,
    decoding: Decoding | None = None,
    batch: Batch | None = None,
    **settings: Any,
) -> NewCase:
    """Build a case for ``info`` and check it.

    Args:
        info: the model; a preset is named in the case, any other is recorded by its path.
        prompts_file: JSON lines; ``None`` takes the default prompts.
        layout: default tp1 dp1 ep1. Prompts of which none names its data-parallel rank are dealt to the ranks in
            turn; where one does, those that do not are rank 0's.
        decoding, batch: defaults of their classes.
        settings: ``dtype``, ``candidate``, ``reference``, ``numerics``.

    Raises:
        UserError: prompts or settings that this model cannot run.
    """
    layout = layout or Layout()
    prompts = encode_prompts(load_prompts(prompts_file), info) if prompts_file else default_prompts(info)
    _refuse_twice(prompts, prompts_file)
    dealt = all(prompt.dp_rank is None for prompt in prompts)
    requests = [
        {
            "name": prompt.name,
            "token_ids": prompt.token_ids,
            "max_new_tokens": prompt.max_new_tokens,
            "arrival": prompt.arrival,
            "dp_rank": index % layout.dp if dealt else prompt.dp_rank or 0,
            "text": prompt.rendered,
        }
        for index, prompt in enumerate(prompts)
    ]
    try:
        case = Case(
            model=info.name if info.preset else str(info.path),
            layout=CaseLayout(tp=layout.tp, dp=layout.dp, ep=layout.ep),
            decoding=decoding or Decoding(),
            batch=batch or Batch(),
            requests=tuple(CaseRequest.model_validate(request) for request in requests),
            **settings,
        )
    except ValidationError as error:
        raise explain(error, "case" if prompts_file is None else str(prompts_file)) from None
    case.check(info)
    return NewCase(case, prompts)


def _refuse_twice(prompts: Sequence[EncodedPrompt], prompts_file: Path | None) -> None:
    """Refuse prompts of one name: what is found is told by the name of the request.

    Raises:
        UserError: says which name, and the prompts that have it.
    """
    places: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts, 1):
        places.setdefault(prompt.name, []).append(number)
    for name, numbers in places.items():
        if len(numbers) > 1:
            raise UserError(
                f"{prompts_file}: the name {name!r} appears more than once, for prompts {', '.join(map(str, numbers))}",
                "give each prompt a name of its own, or leave the names out (they are r0, r1, … then)",
            )
