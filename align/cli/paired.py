"""The run that a replay repeats, as its directory tells it."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from align.errors import UserError
from align.result.pair import Asked, Earlier
from align.result.schema import SCHEMA_VERSION, Result
from align.run.directory import CASE, RESULT, TOKENS
from align.run.manifest import generation_of
from align.run.request import load_request
from align.sentences import said

#: Runs that a replay can follow, in tokens.json.
_FREE = "free"


def earlier_of(path: Path) -> Earlier:
    """What there is of it. What cannot be read says why, and is no obstacle."""
    name = path.absolute().name
    try:
        text = (path / RESULT).read_text(encoding="utf-8")
    except FileNotFoundError:
        return Earlier(name, why=said("paired.no_result"))
    except (OSError, ValueError) as error:
        return Earlier(name, why=said("paired.damaged", why=str(error)))
    try:
        plain = json.loads(text)
        if not isinstance(plain, dict):
            raise ValueError("it is no object")
        if plain.get("schema_version") != SCHEMA_VERSION:
            return Earlier(name, why=said("paired.version"))
        return Earlier(name, Result.model_validate(plain), asked=_asked(path))
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        return Earlier(name, why=said("paired.damaged", why=f"{place}: {error.errors()[0]['msg']}"))
    except ValueError as error:
        return Earlier(name, why=said("paired.damaged", why=str(error)))


def _asked(path: Path) -> Asked:
    """Its recording followed what it was told to, or else the reference's own tokens."""
    try:
        request = load_request(path)
    except UserError:
        return Asked()
    try:
        return Asked(request.along or generated(path, "reference"), request.tensors)
    except UserError:
        return Asked(None, request.tensors)


def generated(path: Path, role: str) -> dict[str, tuple[int, ...]]:
    """Ids by request that a side of a run generated.

    Raises:
        UserError: the run got no tokens, or its file is damaged.
    """
    file = path / TOKENS
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))[_FREE][role]["generations"]
        return {one.request: one.token_ids for one in map(generation_of, rows)}
    except FileNotFoundError:
        raise UserError(f"{path} holds no tokens to follow: there is no {TOKENS}", f"align resume {path}") from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} cannot be followed: {error}", f"run it again: align run --case {path / CASE}"
        ) from error
