"""Controls in which two right engines differ: ``benign.toml``, as trials of which nothing must be said."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from adapters.base import SIDES
from align.drill.library import Engine
from align.drill.settings import DIFFERENT, Setting
from align.drill.trials import Trial

#: Patches that change nothing that is wrong.
FOLDER = Path(__file__).resolve().parents[2] / "adapters" / "drill" / "benign"


class Benign(BaseModel):
    """One table of the file.

    Attributes:
        source: its number in the catalogue.
        why: what differs, in words.
        batch: the requests.
        models: that have what is changed; all if empty.
        patch: name of a file in :data:`FOLDER`, tried on each side.
        tp: tensor-parallel sizes of candidate and reference, for each launch.
        dp: data-parallel groups of both.
        options: engine → options, for each launch.
        allow: conditions that the difference makes false.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    why: str
    batch: str = "plain"
    models: tuple[str, ...] = ()
    patch: str = ""
    tp: tuple[tuple[int, int], ...] = ((1, 1),)
    dp: int = Field(default=1, ge=1)
    options: tuple[dict[Engine, tuple[str, ...]], ...] = ({},)
    allow: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def benign() -> dict[str, Benign]:
    """Name → what may differ."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {name: Benign.model_validate(table) for name, table in tomllib.loads(text).items()}


def benign_controls(models: Sequence[str]) -> list[tuple[Setting, Trial]]:
    """Each difference, on every side or in every launch that it has, with the first of the models that can have it.

    Models may be written with a dash or an underscore; one that is none of a difference's own leaves it out.
    """
    found = []
    for name, one in benign().items():
        able = [model for model in models if not one.models or model.replace("-", "_") in one.models]
        numbers = dict.fromkeys((*SIDES, "none"), 0)
        for model in able if one.models else able[:1]:
            for setting in _settings(one, model):
                for side in SIDES if one.patch else ("none",):
                    trial = Trial("", numbers[side], side, "", {}, None, setting.name, benign=name)
                    numbers[side] += 1
                    found.append((setting, trial))
    return found


def _settings(one: Benign, model: str) -> list[Setting]:
    return [
        Setting(
            model,
            one.batch,
            tp=candidate,
            dp=one.dp,
            reference_tp=None if reference == candidate else reference,
            numerics=DIFFERENT,
            options=tuple((engine, texts) for engine, texts in sorted(options.items())),
            allow=one.allow,
            live=candidate == reference and one.dp == 1,
        )
        for candidate, reference in one.tp
        for options in one.options
    ]


def patch_of(name: str) -> Path | None:
    """The patch of a difference; ``None`` if it has none."""
    given = benign()[name].patch
    return FOLDER / f"{given}.py" if given else None
