"""``PLAN.toml``: which cases a night runs. Presets × layouts × dtypes, and single cases besides.

::

    name = "nightly"
    presets = ["qwen3", "qwen3-moe"]      # presets, or directories of checkpoints
    layouts = ["tp1", "tp2"]
    dtypes = ["bfloat16", "float16"]
    options = ["--max-new-tokens", "8"]   # of align run, for every case
    skip = ["qwen3-moe tp2 *"]            # names of cases, as listed, * stands for anything
    minutes = 30                          # of one case, before it is ended
    keep = 7                              # nights whose run directories are kept

    [[case]]
    name = "long prompts"
    model = "qwen3"
    layout = "tp1"
    dtype = "bfloat16"
    options = ["--prompts", "long.jsonl"]

Paths in it are taken from the plan's own directory.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from align.errors import UserError
from align.layout import parse_layout

#: The plan that comes with this project.
DEFAULT = Path(__file__).with_name("nightly.toml")
_HINT = "align nightly --help shows a whole plan; align nightly --new plan.toml writes one to begin with"
#: Options that a night decides itself.
_TAKEN = (
    "--model", "--case", "--tp", "--dp", "--ep", "--dtype", "--out", "--json", "--quiet", "--dry-run", "--interactive",
)  # fmt: skip
_Minutes = Annotated[float, Field(gt=0)]
_Options = tuple[str, ...]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _options(options: _Options) -> _Options:
    for one in options:
        if one.split("=")[0] in _TAKEN:
            raise ValueError(f"{one} is decided by the night itself")
    return options


def _layout(text: str) -> str:
    parse_layout(text)
    return text


class SingleCase(_Strict):
    """``[[case]]``: one case with options of its own."""

    name: Annotated[str, Field(min_length=1)]
    model: str
    layout: str = "tp1"
    dtype: str = "bfloat16"
    options: _Options = ()

    _check_options = field_validator("options")(_options)
    _check_layout = field_validator("layout")(_layout)


class PlanFile(_Strict):
    """The file as it is written."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")] = "nightly"
    presets: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ("tp1",)
    dtypes: tuple[str, ...] = ("bfloat16",)
    options: _Options = ()
    skip: tuple[str, ...] = ()
    minutes: _Minutes = 30.0
    keep: Annotated[int, Field(ge=1)] = 7
    case: tuple[SingleCase, ...] = ()

    _check_options = field_validator("options")(_options)

    @field_validator("layouts")
    @classmethod
    def _check_layouts(cls, layouts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(_layout, layouts))


@dataclass(frozen=True)
class PlannedCase:
    """One run of a night.

    Attributes:
        name: by which it is known from night to night.
        model, layout, dtype: as ``align run`` takes them.
        options: other options of ``align run``.
    """

    name: str
    model: str
    layout: str
    dtype: str
    options: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """A directory name: what is no letter, digit, dot or dash becomes ``_``."""
        return re.sub(r"[^A-Za-z0-9.-]+", "_", self.name)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of ``align run``, without where it writes."""
        layout = parse_layout(self.layout)
        sizes = ("--tp", str(layout.tp), "--dp", str(layout.dp), "--ep", str(layout.ep))
        return ("--model", self.model, *sizes, "--dtype", self.dtype, *self.options)


@dataclass(frozen=True)
class Plan:
    """What a night runs, in order.

    Attributes:
        name: of the plan; nights of one name follow one another.
        directory: from which paths in it are taken.
        minutes: after which a case is ended.
        keep: nights whose run directories are kept.
    """

    name: str
    directory: Path
    cases: tuple[PlannedCase, ...]
    minutes: float
    keep: int


def read_plan(path: Path) -> Plan:
    """The cases of a plan.

    Raises:
        UserError: no such file, no TOML, a key or value that is none, two cases of one name, or none at all.
    """
    try:
        plain = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}", _HINT) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no TOML file: {error}", _HINT) from error
    try:
        given = PlanFile.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}", _HINT) from error
    crossed = [
        PlannedCase(f"{model} {layout} {dtype}", model, layout, dtype, given.options)
        for model in given.presets
        for layout in given.layouts
        for dtype in given.dtypes
    ]
    single = [
        PlannedCase(one.name, one.model, one.layout, one.dtype, given.options + one.options) for one in given.case
    ]
    cases = [one for one in (*crossed, *single) if not any(fnmatchcase(one.name, text) for text in given.skip)]
    seen: dict[str, str] = {}
    for one in cases:
        other = seen.setdefault(one.folder, one.name)
        if other != one.name or sum(case.name == one.name for case in cases) > 1:
            raise UserError(f"{path}: two cases are called {one.name!r}, or too much alike", "give each another name")
    if not cases:
        raise UserError(f"{path} names no case", _HINT)
    return Plan(given.name, path.absolute().parent, tuple(cases), given.minutes, given.keep)
