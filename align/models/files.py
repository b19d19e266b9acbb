"""Small files beside the weights: JSON and the default prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from align.errors import UserError

PROMPTS_FILE = "prompts.json"


def write_json(file: Path, value: Any) -> None:
    """Write ``value`` as indented UTF-8 JSON."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_prompts(folder: Path, prompts: Iterable[tuple[Sequence[int], str | None]]) -> None:
    """Store default prompts as ids and (for reading) text, so that running them needs no tokenizer."""
    rows = [json.dumps({"token_ids": list(ids), "text": text}, ensure_ascii=False) for ids, text in prompts]
    (folder / PROMPTS_FILE).write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


def read_prompts(folder: Path) -> tuple[tuple[tuple[int, ...], str | None], ...]:
    """The prompts that :func:`write_prompts` stored.

    Raises:
        UserError: the file is gone or damaged.
    """
    file = folder / PROMPTS_FILE
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        return tuple((tuple(int(token) for token in row["token_ids"]), row["text"]) for row in rows)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} is missing or damaged", f"remove {folder}; the next run builds it again") from error
