"""Results of made-up runs: the two-layer Llama of :mod:`tests.unit.align.run.recordings`, judged by the real flow."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from align.compare.noise import NoisePolicy
from align.compare.tokens import TokenComparison, compare_tokens
from align.errors import UserError
from align.result.build import Command, result_of
from align.result.facts import NO_ANSWERS, Answers
from align.result.ground import Ground, ground_of_run
from align.result.schema import Result
from align.run import certify
from align.run.flow import Flow, Wishes
from align.run.plan import SideExtras
from align.run.report import Report
from tests.unit.align.compare import traces
from tests.unit.align.run import recordings


def wrong_up(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
    """A fault of layer 1."""
    tensors["layers.1.mlp.up"] = tensors["layers.1.mlp.up"] * 2


class Run:
    """One run: its report, and the result that is made of it."""

    def __init__(
        self,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
        edit: traces.Edit | None = None,
        conditions: tuple[Any, ...] = (),
        wishes: Wishes | None = None,
        extras: dict[str, SideExtras] | None = None,
    ) -> None:
        judged = conditions or (recordings.condition(),)
        monkeypatch.setattr(certify, "evaluate", lambda *_, **__: judged)
        monkeypatch.setattr(certify, "file_hashes", lambda path: {"model.safetensors": "00"})
        self.session = cast(Any, recordings.Scripted(directory))
        if edit is not None:
            self.session.edits["candidate"] = edit
        self.directory, self.extras = directory, extras or {}
        self.flow = Flow(self.session, recordings.case(), recordings.info(), wishes or Wishes())
        self.error: UserError | None = None

    def go(self) -> Run:
        try:
            self.flow.run()
        except UserError as error:
            self.error = error
        return self

    @property
    def report(self) -> Report:
        return self.flow.report

    def ground(self) -> Ground:
        return ground_of_run(
            recordings.case(), recordings.info(), self.session.outcome, "simnpu", self.extras, self.directory
        )

    def result(self, answers: Answers = NO_ANSWERS, argv: tuple[str, ...] = ("align", "run")) -> Result:
        return result_of(
            self.report, self.ground(), Command(argv, "2024-01-01T00:00:00", self.directory, "go"), answers
        )


def comparison(candidate: dict[str, tuple[int, ...]], reference: dict[str, tuple[int, ...]]) -> TokenComparison:
    """Of a free run; ids are a distance apart that no noise explains."""
    sides = (recordings.generations(candidate), recordings.generations(reference))
    return compare_tokens(*sides, mode="free", policy=NoisePolicy.for_dtype("bfloat16"))
