"""Faults as data: what each file of a folder of patches says of itself, in a literal that is read and not run.

A fault is a patch (``align run --patch``) with two literals at its top::

    FAULT = {"path": "B", "kind": "operator", "checkpoint": "layers.{layer}.mlp.down", "source": "…",
             "draws": {"layer": [0, 1, 2, 3], "factor": [1.05, 1.2]}}
    DRAWN = {"layer": 1, "factor": 1.2}

``FAULT`` is what must be said of it; ``draws`` are the values that a trial draws from, and the patch reads what was
drawn in ``DRAWN``, whose own values hold where the file is used as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from align.errors import UserError
from align.findings import PATHS

#: The faults that come with this project.
FOLDER = Path(__file__).resolve().parents[2] / "adapters" / "drill" / "faults"
Engine = Literal["lmdeploy", "vllm"]
#: Candidate and reference of a drill.
ENGINES: tuple[Engine, Engine] = ("lmdeploy", "vllm")
_HINT = "align drill --new NAME writes a fault to begin with; align drill --help says what its parts are"
_Plain = str | int | float | bool


class Sweep(BaseModel):
    """Which drawn number is halved in steps towards ``neutral``, where there is no fault any more."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    neutral: float


class Said(BaseModel):
    """``FAULT`` of a file; texts in braces are filled with what was drawn.

    Attributes:
        path, kind: of the first finding; several kinds if any of them is right.
        checkpoint: of the first finding; ``None`` if it has none, or any.
        layer, phase, step, request: of the first finding, where they are part of what must be said; ``request`` is a
            number in the batch.
        ranks: of the first finding.
        source: where such a fault was seen.
        draws: name → values.
        batch: the requests, a name in ``batches.toml``.
        options: engine → engine options of its side.
        tp: tensor-parallel size that it needs.
        sweep: the number that tells how large it is, if there is one.
        live: whether it can be put into an engine that is up; otherwise each trial launches engines of its own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    kind: str | tuple[str, ...]
    source: str = Field(min_length=3)
    checkpoint: str | None = None
    layer: int | str | None = None
    phase: str | None = None
    step: int | str | None = None
    request: int | str | None = None
    ranks: tuple[int, ...] | None = None
    draws: dict[str, tuple[_Plain, ...]] = {}
    engines: tuple[Engine, ...] = ENGINES
    batch: str = "plain"
    options: dict[str, tuple[str, ...]] = {}
    allow: tuple[str, ...] = ()
    tp: int = Field(default=1, ge=1)
    sweep: Sweep | None = None
    live: bool = True

    @field_validator("path")
    @classmethod
    def _a_path(cls, value: str) -> str:
        if value not in PATHS:
            raise ValueError(f"{value} is none of {', '.join(PATHS)}")
        return value

    @field_validator("draws")
    @classmethod
    def _something_to_draw(cls, value: dict[str, tuple[_Plain, ...]]) -> dict[str, tuple[_Plain, ...]]:
        empty = [name for name, values in value.items() if not values]
        if empty:
            raise ValueError(f"no value for {', '.join(empty)}")
        return value

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.kind,) if isinstance(self.kind, str) else self.kind


@dataclass(frozen=True)
class Fault:
    """One file.

    Attributes:
        name: of the file, without its suffix.
        title: first line of its docstring.
        said: what must be said of it.
        drawn: the file's own ``DRAWN``.
        text: all of it.
    """

    name: str
    title: str
    said: Said
    drawn: dict[str, Any]
    text: str


def read_fault(path: Path) -> Fault:
    """One fault.

    Raises:
        UserError: the file cannot be read, or says something else; names the part.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", _HINT) from None
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no Python: {error}", _HINT) from None
    title = (ast.get_docstring(tree) or "").strip().partition("\n")[0]
    if not title:
        raise UserError(f"{path} has no docstring, which is the fault's title", _HINT)
    found = _literals(tree, path)
    if "FAULT" not in found:
        raise UserError(f"{path} has no FAULT", _HINT)
    try:
        said = Said.model_validate(found["FAULT"])
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: FAULT {at}: {first['msg']}", _HINT) from None
    drawn = found.get("DRAWN", {})
    if not isinstance(drawn, dict) or set(drawn) != set(said.draws):
        raise UserError(f"{path}: DRAWN must have a value for each of draws: {', '.join(said.draws) or 'none'}", _HINT)
    _check_texts(path, said)
    sizes = said.draws.get(said.sweep.name, ()) if said.sweep is not None else (0.0,)
    if not sizes or not all(isinstance(one, (int, float)) for one in sizes):
        raise UserError(f"{path}: FAULT sweep: its name must be one of draws, with numbers", _HINT)
    if not any(isinstance(node, ast.FunctionDef) and node.name == "apply" for node in tree.body):
        raise UserError(f"{path} has no apply(ctx)", _HINT)
    return Fault(path.stem, title, said, drawn, text)


def read_faults(folders: Iterable[Path] = (FOLDER,)) -> tuple[Fault, ...]:
    """The faults of some folders, by name.

    Raises:
        UserError: a folder without any, a file that is none, or two of one name.
    """
    found: dict[str, Fault] = {}
    for folder in folders:
        files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        if not files:
            raise UserError(f"{folder} has no faults", _HINT)
        for path in files:
            fault = read_fault(path)
            if fault.name in found:
                raise UserError(f"two faults are called {fault.name}", "rename one of the files")
            found[fault.name] = fault
    return tuple(found[name] for name in sorted(found))


def _literals(tree: ast.Module, path: Path) -> dict[str, Any]:
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("FAULT", "DRAWN"):
                try:
                    found[name] = ast.literal_eval(node.value)
                except ValueError:
                    raise UserError(f"{path}: {name} must be written out, without names or calls", _HINT) from None
    return found


def _check_texts(path: Path, said: Said) -> None:
    """A text in braces that is not drawn is a slip."""
    example = {name: values[0] for name, values in said.draws.items()}
    for name in ("checkpoint", "layer", "step", "request"):
        value = getattr(said, name)
        if isinstance(value, str):
            try:
                value.format(**example)
            except (KeyError, IndexError, ValueError) as error:
                what = f"{path}: FAULT {name}: {value!r} asks for {error}, which is not drawn"
                raise UserError(what, _HINT) from None
