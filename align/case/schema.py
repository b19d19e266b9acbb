"""The case: everything that decides what both engines run, in one file that a person can read.

The file is JSON with one request per line. What is written reads back equal; unknown or repeated fields are
refused.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from adapters.base import Request
from align.errors import UserError
from align.layout import Layout
from align.models.info import ModelInfo

DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}

Engine = Literal["lmdeploy", "vllm", "transformers"]
TokenId = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
#: Names appear in file names and reports.
RequestName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


def _dtype_alias(value: Any) -> Any:
    return DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value


Dtype = Annotated[Literal["bfloat16", "float16"], BeforeValidator(_dtype_alias)]


class Strict(BaseModel):
    """No conversions, no unknown fields, no changes after the fact."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class CaseRequest(Strict):
    """One request.

    Attributes:
        name: identity in every record.
        token_ids: the prompt, ``[prompt_len]`` ids.
        max_new_tokens: overrides the case's decoding.
        arrival: engine step before which the request is admitted; 0 joins the first group.
        dp_rank: data-parallel rank that serves it.
        text: what the ids say, for the reader only.
    """

    name: RequestName
    token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    max_new_tokens: Count | None = None
    arrival: Annotated[int, Field(ge=0)] = 0
    dp_rank: Annotated[int, Field(ge=0)] = 0
    text: str | None = None


class Decoding(Strict):
    """Greedy decoding: how many tokens, how many logprobs per token, and whether EOS ends a request."""

    max_new_tokens: Count = 16
    top_logprobs: Annotated[int, Field(ge=1, le=20)] = 5
    ignore_eos: bool = True


class CaseLayout(Strict):
    """The layout triple as the file has it; see :class:`align.layout.Layout`."""

    tp: int = 1
    dp: int = 1
    ep: int = 1

    @model_validator(mode="after")
    def _rules(self) -> CaseLayout:
        self.to_layout()
        return self

    def to_layout(self) -> Layout:
        return Layout(self.tp, self.dp, self.ep)


class Batch(Strict):
    """How requests meet in the engine.

    Attributes:
        block_size: tokens in one KV-cache block.
        max_batch: requests that may run in one step; ``None`` means all of a data-parallel rank.
        together: hold the requests of one arrival until all are queued, so that one step admits them all.
    """

    block_size: Count = 128
    max_batch: Count | None = None
    together: bool = True


NumericsName = Literal["native", "fp32-internal"]


class Numerics(Strict):
    """Numerics of the simulated operators per side; ``None`` leaves the default. Means nothing on hardware."""

    candidate: NumericsName | None = None
    reference: NumericsName | None = None


class Case(Strict):
    """One case; ``model`` is a preset's name or a checkpoint directory.

    Attributes:
        reference_layout: of the reference, where it has another one than ``layout``: an engine against itself.
    """

    schema_version: Literal[1] = 1
    model: Annotated[str, Field(min_length=1)]
    dtype: Dtype = "bfloat16"
    candidate: Engine = "lmdeploy"
    reference: Engine = "vllm"
    layout: CaseLayout = CaseLayout()
    reference_layout: CaseLayout | None = None
    decoding: Decoding = Decoding()
    batch: Batch = Batch()
    numerics: Numerics = Numerics()
    requests: Annotated[tuple[CaseRequest, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Case:
        twice = [name for name, count in Counter(request.name for request in self.requests).items() if count > 1]
        if twice:
            raise ValueError(f"request names must differ, {', '.join(twice)} appears more than once")
        for request in self.requests:
            if request.dp_rank >= self.layout.dp:
                raise ValueError(
                    f"request {request.name} has dp_rank {request.dp_rank}, "
                    f"but dp={self.layout.dp}: valid are 0 … {self.layout.dp - 1}"
                )
        if not any(request.arrival == 0 for request in self.requests):
            raise ValueError("no request has arrival 0, so the engine would never start")
        if self.batch.together and self.batch.max_batch is not None:
            for (rank, arrival), count in sorted(_groups(self.requests).items()):
                if count > self.batch.max_batch:
                    raise ValueError(
                        f"{count} requests arrive together at step {arrival} on dp_rank {rank}, "
                        f"but batch.max_batch is {self.batch.max_batch}"
                    )
        return self

    def at(self, role: str) -> Case:
        """The case as one side runs it: with that side's layout alone, and its requests dealt to its groups."""
        if self.reference_layout is None:
            return self
        own = self.layout if role == "candidate" else self.reference_layout
        return self.with_layout(own.to_layout())

    def with_layout(self, layout: Layout) -> Case:
        """The same case at another layout, of both sides. Requests of groups that it lacks go to the others."""
        dealt = tuple(one.model_copy(update={"dp_rank": one.dp_rank % layout.dp}) for one in self.requests)
        batch = self.batch
        if batch.max_batch is not None and batch.together:  # groups that became one arrive together all the same
            batch = batch.model_copy(update={"max_batch": max(batch.max_batch, *_groups(dealt).values())})
        own = CaseLayout(tp=layout.tp, dp=layout.dp, ep=layout.ep)
        changes = {"layout": own, "reference_layout": None, "requests": dealt, "batch": batch}
        return self.model_copy(update=changes)

    def new_tokens(self, request: CaseRequest) -> int:
        """How many tokens ``request`` generates at most."""
        return request.max_new_tokens or self.decoding.max_new_tokens

    def only(self, names: Collection[str]) -> Case:
        """The case with some of its requests, of which the first arrives at once.

        Raises:
            UserError: a name that no request has.
        """
        have = [request.name for request in self.requests]
        unknown = [name for name in names if name not in have]
        if unknown:
            raise UserError(f"the case has no request {unknown[0]}", f"it has {', '.join(have)}")
        chosen = [request for request in self.requests if request.name in names]
        first = min(request.arrival for request in chosen)
        moved = tuple(request.model_copy(update={"arrival": request.arrival - first}) for request in chosen)
        return self.model_copy(update={"requests": moved})

    def to_requests(self, eos_ids: Sequence[int] = ()) -> tuple[Request, ...]:
        """The requests as adapters take them.

        Args:
            eos_ids: the model's end ids; they stop a request only if ``decoding.ignore_eos`` is off.

        Raises:
            ValueError: EOS must be obeyed but no id is given.
        """
        if not self.decoding.ignore_eos and not eos_ids:
            raise ValueError("decoding.ignore_eos is off, so the model's eos_ids are needed")
        stop = () if self.decoding.ignore_eos else tuple(eos_ids)
        return tuple(
            Request(
                name=request.name,
                token_ids=request.token_ids,
                max_new_tokens=self.new_tokens(request),
                arrival=request.arrival,
                dp_rank=request.dp_rank,
                stop_ids=stop,
            )
            for request in self.requests
        )

    def check(self, info: ModelInfo) -> None:
        """Check the case against the model it names.

        Raises:
            UserError: an id outside the vocabulary, a sequence longer than the context, a layout the model
                cannot take.
        """
        for one in (self.layout, self.reference_layout):
            layout = None if one is None else one.to_layout()
            try:
                if layout is not None:
                    layout.check_model(info.config)
            except ValueError as error:
                message, _, valid = str(error).partition("; ")
                raise UserError(f"layout {layout} does not fit {info.name}: {message}", f"use {valid}") from None
        if not self.decoding.ignore_eos and not info.eos_ids:
            raise UserError(
                f"decoding.ignore_eos is off, but {info.name} names no eos_token_id",
                "set ignore_eos to true, or add eos_token_id to generation_config.json",
            )
        for request in self.requests:
            wrong = next((index for index, token in enumerate(request.token_ids) if token >= info.vocab_size), None)
            if wrong is not None:
                raise UserError(
                    f"request {request.name}: token_ids[{wrong}] is {request.token_ids[wrong]}, outside the "
                    f"vocabulary of {info.name} (0 … {info.vocab_size - 1})",
                    "correct the id, or give text and let the model's tokenizer choose the ids",
                )
            prompt, new = len(request.token_ids), self.new_tokens(request)
            if prompt + new > info.max_positions:
                raise UserError(
                    f"request {request.name}: {prompt} prompt tokens and {new} new tokens exceed the "
                    f"{info.max_positions} positions of {info.name}",
                    f"shorten the prompt to {info.max_positions - new} tokens"
                    if new < info.max_positions
                    else f"lower max_new_tokens below {info.max_positions}",
                )

    def to_text(self) -> str:
        """The file's content."""
        body = self.model_dump(mode="json")
        if self.reference_layout is None:
            del body["reference_layout"]
        rows = body.pop("requests")
        lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}," for key, value in body.items()]
        written = [json.dumps(_without_defaults(row), ensure_ascii=False) for row in rows]
        requests = ",\n".join(f"    {row}" for row in written)
        return "{\n" + "\n".join(lines) + '\n  "requests": [\n' + requests + "\n  ]\n}\n"

    def save(self, file: Path) -> None:
        """Write the case in one step: a reader sees the old file or the whole new one."""
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            temporary.write_text(self.to_text(), encoding="utf-8")
            temporary.replace(file)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(
                f"cannot write {file}: {error.strerror or error}",
                "free some space or name another output directory",
            ) from error


def _groups(requests: Iterable[CaseRequest]) -> Counter[tuple[int, int]]:
    return Counter((request.dp_rank, request.arrival) for request in requests)


def _without_defaults(row: dict[str, Any]) -> dict[str, Any]:
    defaults = {name: field.default for name, field in CaseRequest.model_fields.items() if not field.is_required()}
    return {key: value for key, value in row.items() if key not in defaults or value != defaults[key]}


def parse_case(text: str, source: str = "case") -> Case:
    """Read a case from the content of its file.

    Raises:
        UserError: names ``source``, the field and what to do.
    """
    try:
        json.loads(text, object_pairs_hook=refuse_repeats)
        return Case.model_validate_json(text)
    except ValidationError as error:
        raise explain(error, source) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not JSON: {error}", "repair the file, or run again to write a new one") from None


def load_case(file: Path) -> Case:
    """Read the case that an earlier run wrote.

    Raises:
        UserError: missing, unreadable, malformed or inconsistent.
    """
    return parse_case(read_text(file, "CASE"), str(file))


def read_text(file: Path, option: str) -> str:
    """Content of a user's UTF-8 file.

    Raises:
        UserError: names the file and the option that gave it.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{option} file {file} does not exist", f"check the path given in {option}=") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{option} file {file} is not UTF-8 (byte {error.start})", "save it as UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot read {option} file {file}: {reason}", f"give a readable file in {option}=") from None


def refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """``object_pairs_hook`` of :func:`json.loads` that raises ``ValueError`` where JSON would keep the last
    of two.
    """
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if repeated:
        raise ValueError(f"field {repeated[0]!r} appears twice in one object")
    return dict(pairs)


def explain(error: ValidationError, source: str) -> UserError:
    """One message for everything pydantic found: the field's path, its value and what it should be."""
    found = error.errors(include_url=False)
    # A refused item also makes its list "too short"; only the item is worth a line.
    problems = [
        problem
        for problem in found
        if problem["type"] != "too_short" or not any(_is_inside(other["loc"], problem["loc"]) for other in found)
    ]
    lines = []
    for problem in problems[:5]:
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
        text = problem["msg"].removeprefix("Value error, ").replace("Tuple should", "List should")
        text = text.removesuffix(" after validation, not 0")
        given = problem.get("input")
        scalar = isinstance(given, str | int | float | bool) and problem["type"] not in (
            "json_invalid",
            "extra_forbidden",
        )
        shown = f" (got {given!r:.60})" if scalar else ""
        lines.append(f"{path + ': ' if path else ''}{text[0].lower() + text[1:]}{shown}")
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return UserError(f"{source}: {'; '.join(lines)}{more}", "correct the named fields and run again")


def _is_inside(inner: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer
