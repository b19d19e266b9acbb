"""What a run was asked for besides its case, so that it can be taken up again as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from align.case.schema import Strict, explain
from align.errors import UserError
from align.run.directory import CASE, REQUEST


class RunRequest(Strict):
    """``request.json`` of a run directory.

    Attributes:
        command: as it was typed.
        fingerprint: of the model that the case names, when the run began.
        sets, patches: as typed; the files of ``patches`` are absolute paths.
        patch_sha256: by file.
        named_model, named_layout: whether the user named them, or they are the defaults.
        along: ids by request that the recording follows instead of the reference's own.
        earlier: directory of the run that this one repeats; empty if it repeats none.
        ladder, layouts, min_tp, device_memory: the walk over simpler layouts.
        routing: as ``--replay-routing`` says.
        confirm, accuse: transplants, as ``--no-confirm`` and ``--confirm`` say.
    """

    schema_version: Literal[1] = 1
    command: tuple[str, ...] = ()
    fingerprint: str
    device: str
    sets: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    patch_sha256: dict[str, str] = Field(default_factory=dict)
    allow: tuple[str, ...] = ()
    policy: str = "derived"
    floor: str = "auto"
    min_coverage: float = 100.0
    tensors: bool = True
    capture: tuple[str, ...] = ()
    values_budget: int | None = None
    lean: bool = False
    audit: bool = True
    fa: bool = True
    fresh: bool = False
    routing: str = "auto"
    replay: str = "auto"
    launch_timeout: float = 600.0
    step_timeout: float = 180.0
    symptom: str | None = None
    onset: str | None = None
    batching: str | None = None
    stage: str | None = None
    baseline: str | None = None
    named_model: bool = False
    named_layout: bool = False
    lang: str = "en"
    along: dict[str, tuple[int, ...]] | None = None
    earlier: str = ""
    confirm: bool = True
    accuse: tuple[str, ...] = ()
    ladder: str = "never"
    layouts: tuple[str, ...] = ()
    min_tp: int | None = None
    device_memory: float | None = None

    def to_text(self) -> str:
        """The file's content."""
        return self.model_dump_json(indent=2) + "\n"

    def check_patches(self) -> None:
        """Refuse to go on with patches that are not what they were.

        Raises:
            UserError: one has changed, or is gone.
        """
        for file, was in self.patch_sha256.items():
            if digests((file,)).get(file) != was:
                raise UserError(
                    f"the patch {file} is not what it was when the run began", "start a new run: align run --case …"
                )


def digests(files: Iterable[str]) -> dict[str, str]:
    """SHA-256 of each file that can be read."""
    return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files if Path(file).is_file()}


def patch_files(patches: Iterable[str]) -> tuple[str, ...]:
    """The files of ``SIDE=FILE``."""
    return tuple(text.partition("=")[2] for text in patches)


def load_request(directory: Path) -> RunRequest:
    """What the run in a directory was asked for.

    Raises:
        UserError: there is no run there, or its file is damaged or of another version.
    """
    file = directory / REQUEST
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory", "give one that align run made, as its summary names it")
    if not file.is_file() or not (directory / CASE).is_file():
        missing = REQUEST if not file.is_file() else CASE
        whole = directory.absolute().parent
        if (whole / REQUEST).is_file():
            raise UserError(f"{directory} is a part of a run", f"name the whole run: {whole}")
        raise UserError(
            f"{directory} holds no run that can be taken up: there is no {missing}",
            f"start it anew: align run --case {directory / CASE}"
            if (directory / CASE).is_file()
            else "start it anew: align run",
        )
    try:
        return RunRequest.model_validate_json(file.read_text(encoding="utf-8"))
    except ValidationError as error:
        found = explain(error, str(file))
        raise UserError(
            f"{found.message}: the file is damaged, or was written by another version of align",
            f"start it anew: align run --case {directory / CASE}",
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}", f"start anew: align run --case {directory / CASE}") from None
