"""Prompts as the user gives them (text, messages or ids) and as the engines take them (ids)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from align.case.schema import Count, RequestName, Strict, TokenId, explain, read_text, refuse_repeats
from align.case.tokenizer import PromptTokenizer, SpecialToken
from align.errors import UserError
from align.models.files import read_prompts
from align.models.info import ModelInfo
from align.models.text import cut_to_lengths


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Prompt(Strict):
    """One line of a prompts file: exactly one of ``text``, ``messages`` and ``token_ids``."""

    text: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[tuple[Message, ...], Field(min_length=1)] | None = None
    token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)] | None = None
    name: RequestName | None = None
    max_new_tokens: Count | None = None
    arrival: Annotated[int, Field(ge=0)] = 0
    dp_rank: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Prompt:
        given = [name for name in ("text", "messages", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"give exactly one of text, messages and token_ids, found {found}")
        return self


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as ids, and how it came to them.

    Attributes:
        name: request name.
        token_ids: exact ids, ``[prompt_len]``.
        source: ``text``, ``messages``, ``token_ids`` or ``default``.
        rendered: the text that was tokenised, after the chat template; ``None`` for ids.
        special: special tokens among the ids that the tokenizer added or the template wrote.
        warnings: double BOS and the like, one sentence each.
        max_new_tokens, arrival, dp_rank: as in the prompts file; a ``dp_rank`` of ``None`` is not said there.
    """

    name: str
    token_ids: tuple[int, ...]
    source: str
    rendered: str | None = None
    special: tuple[SpecialToken, ...] = ()
    warnings: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    arrival: int = 0
    dp_rank: int | None = None


def load_prompts(file: Path) -> tuple[Prompt, ...]:
    """Read a prompts file: one JSON object a line, empty lines skipped.

    Raises:
        UserError: names the file, the line and the field.
    """
    prompts = []
    for number, line in enumerate(read_text(file, "PROMPTS").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            _check_names(json.loads(line, object_pairs_hook=refuse_repeats), where)
            prompts.append(Prompt.model_validate_json(line))
        except ValidationError as error:
            raise explain(error, where) from None
        except (ValueError, RecursionError) as error:
            hint = 'write one JSON object a line, e.g. {"text": "Hello"}'
            raise UserError(f"{where}: not JSON: {error}", hint) from None
    if not prompts:
        raise UserError(f"PROMPTS file {file} holds no prompt", 'write one JSON object a line, e.g. {"text": "Hello"}')
    return tuple(prompts)


def _check_names(given: Any, where: str) -> None:
    """Refuse fields that a line of a prompts file does not have; what was meant is named, if it looks like one.

    Raises:
        UserError: names the file, the line and the field.
    """
    known = list(Prompt.model_fields)
    for name in given if isinstance(given, dict) else ():
        if name not in known:
            meant = get_close_matches(name, known, n=1)
            raise UserError(
                f"{where}: there is no field {name!r}",
                f"{f'did you mean {meant[0]!r}? ' if meant else ''}the fields are {', '.join(known)}",
            )


def encode_prompts(prompts: Sequence[Prompt], info: ModelInfo) -> tuple[EncodedPrompt, ...]:
    """Turn prompts into ids with the checkpoint's own tokenizer (not loaded when all prompts are ids).

    Prompts without a name are called ``r<index>``.

    Raises:
        UserError: no usable tokenizer, no chat template for ``messages``, or a prompt without tokens.
    """
    needs_tokenizer = any(prompt.token_ids is None for prompt in prompts)
    tokenizer = PromptTokenizer(info.path) if needs_tokenizer else None
    return tuple(_encode(prompt, prompt.name or f"r{index}", info, tokenizer) for index, prompt in enumerate(prompts))


def _encode(prompt: Prompt, name: str, info: ModelInfo, tokenizer: PromptTokenizer | None) -> EncodedPrompt:
    common: dict[str, Any] = {
        "name": name,
        "max_new_tokens": prompt.max_new_tokens,
        "arrival": prompt.arrival,
        "dp_rank": prompt.dp_rank,
    }
    if prompt.token_ids is not None:
        warnings = double_bos(prompt.token_ids, info.bos_id)
        return EncodedPrompt(token_ids=prompt.token_ids, source="token_ids", warnings=warnings, **common)
    assert tokenizer is not None
    if prompt.messages is not None:
        encoded = tokenizer.encode_messages([message.model_dump() for message in prompt.messages], name)
        source = "messages"
    else:
        assert prompt.text is not None
        encoded = tokenizer.encode_text(prompt.text, name)
        source = "text"
    bos = info.bos_id if tokenizer.bos_id is None else tokenizer.bos_id
    return EncodedPrompt(
        token_ids=encoded.token_ids,
        source=source,
        rendered=encoded.rendered,
        special=encoded.special,
        warnings=(*double_bos(encoded.token_ids, bos), *encoded.warnings),
        **common,
    )


def double_bos(ids: Sequence[int], bos_id: int | None) -> tuple[str, ...]:
    """A warning if the sequence opens with two BOS."""
    if bos_id is not None and len(ids) > 1 and ids[0] == ids[1] == bos_id:
        return (f"double BOS: the ids start with {bos_id} twice; the model has not been trained on that",)
    return ()


def default_prompts(info: ModelInfo) -> tuple[EncodedPrompt, ...]:
    """1, 7, 33 and 200 tokens: stored beside a preset, English text cut to these lengths for any other model.

    Raises:
        UserError: the checkpoint has no usable tokenizer, or its preset's prompts are damaged.
    """
    if info.preset:
        return tuple(
            EncodedPrompt(f"r{index}", ids, "default", rendered=text)
            for index, (ids, text) in enumerate(read_prompts(info.path))
        )
    tokenizer = PromptTokenizer(info.path)
    try:
        prompts = cut_to_lengths(lambda text: tokenizer.encode_text(text, "default").token_ids)
    except ValueError as error:
        raise UserError(f"default prompts for {info.name}: {error}", "give token_ids in PROMPTS=file.jsonl") from None
    return tuple(
        EncodedPrompt(f"r{index}", ids, "default", rendered=tokenizer.decode(ids))
        for index, ids in enumerate(prompts.values())
    )
