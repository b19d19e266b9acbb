"""What a run leaves in its directory, also when something stopped it: record, tokens, result, report."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from align.case.schema import Case
from align.checklists.evaluate import with_checklists
from align.cli.paired import earlier_of
from align.errors import UserError
from align.models.info import ModelInfo
from align.report.forms import forms
from align.result.build import Command, result_of
from align.result.facts import Answers
from align.result.ground import ground_of_run
from align.result.pair import Asked, Followed, paired_with
from align.result.schema import Result
from align.run.directory import RESULT, RUN, TOKENS, RunDirectory
from align.run.outcome import Outcome
from align.run.plan import SideExtras
from align.run.record import run_record, tokens_record
from align.run.report import Report


@dataclass
class Known:
    """What is known of a run, filled as it becomes known.

    Attributes:
        device: as asked for.
        answers: the user's.
        lang: of the report, beside the English one.
        tensors: whether tensors were to be compared.
        argv: the command as it was typed.
        earlier: directory of the run that this one repeats; ``None`` if it repeats none.
        followed: ids by request that the recording was told to follow.
        result: what was left last.
    """

    device: str
    answers: Answers
    lang: str
    tensors: bool
    argv: Sequence[str] = field(default_factory=lambda: tuple(sys.argv))
    extras: Mapping[str, SideExtras] = field(default_factory=dict)
    case: Case | None = None
    info: ModelInfo | None = None
    directory: RunDirectory | None = None
    outcome: Outcome | None = None
    report: Report = field(default_factory=Report)
    earlier: Path | None = None
    followed: Followed | None = None
    result: Result | None = None
    started: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds"))

    def leave(self, next_step: str) -> Result:
        """Write everything, the result last, so that one that is there speaks of files that are whole.

        Raises:
            UserError: the disk is full or not writable.
        """
        path = None if self.directory is None else self.directory.path
        result = result_of(
            self.report,
            ground_of_run(self.case, self.info, self.outcome, self.device, self.extras, path),
            Command(self.argv, self.started, path, next_step, self.tensors),
            self.answers,
        )
        if self.earlier is not None:
            paired = paired_with(earlier_of(self.earlier), result, Asked(self.followed, self.tensors))
            result = result.model_copy(update={"paired": paired})
        self.result = result = with_checklists(result)
        if self.directory is not None:
            self._write(self.directory, result)
        return result

    def tell(self) -> None:
        """Print the result on standard output; nothing else is printed there then."""
        if self.result is not None:
            sys.stdout.write(text_of(self.result))
            sys.stdout.flush()

    def _write(self, directory: RunDirectory, result: Result) -> None:
        if self.case is not None and self.info is not None and self.outcome is not None:
            self.keep_tokens()
            directory.write_json(RUN, run_record(self.case, self.info, self.outcome, self.report, list(self.argv)))
        self.publish(result)

    def publish(self, result: Result) -> None:
        """Write the reports and the result anew.

        Raises:
            UserError: the disk is full or not writable.
        """
        assert self.directory is not None
        self.result = result = with_checklists(result)  # anew: there may be a ladder now
        for lang in dict.fromkeys(("en", self.lang)):
            for name, text in forms(result, lang):
                self.directory.write(name, text)
        self.directory.write(RESULT, text_of(result))

    def keep_tokens(self) -> None:
        """Write the tokens that are known.

        Raises:
            UserError: the disk is full or not writable.
        """
        tokens = {} if self.outcome is None else tokens_record(self.outcome)
        if tokens and self.directory is not None:
            self.directory.write_json(TOKENS, tokens)

    def leave_after(self, error: BaseException) -> None:
        """The same of a run that did not end by itself; ``error`` stays the news, whatever else goes wrong."""
        hint = "run it again"
        if isinstance(error, UserError):
            reason, hint = error.message, error.hint
        elif isinstance(error, Exception):
            reason = f"a defect of align: {type(error).__name__}: {error}"
        else:
            reason = "interrupted"
            if self.directory is not None:
                hint = f"align resume {self.directory.path}"
        self.report.reason = self.report.reason or reason
        try:
            self.leave(hint)
        except UserError as second:  # that the disk is full may be the very reason
            error.add_note(f"what is known could not be written: {second.message}")
        except Exception as second:
            error.add_note(f"what is known could not be written: {type(second).__name__}: {second}")


def text_of(result: Result) -> str:
    """The file's content."""
    return json.dumps(result.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
