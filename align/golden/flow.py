"""From a run directory to the comparison of its sides with golden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.base import SIDES
from align.checkpoints.table import structure_of
from align.errors import UserError
from align.golden import record, size
from align.golden.compare import GOLDEN, GoldenComparison, Progress, compare_golden
from align.golden.experts import experts_of, used_by
from align.golden.judge import GoldenPolicy
from align.models.info import ModelInfo, read_info
from align.run.judge import one_thread
from align.run.manifest import REPLAY, generations_of, model_info_of
from align.run.traces import TRACE, find_trace, open_trace
from align.trace.reader import Trace

_AGAIN = "run the case again: align run --case {0}/case.json"


@dataclass(frozen=True)
class GoldenRun:
    """What was found, and what it rests on.

    Attributes:
        comparison: of both sides.
        engines: by side.
        simulated: whether a side ran on a simulated device.
        dtype: of the sides.
        trace: golden's, with its bytes.
        reused: it was there already.
        model: name of the checkpoint.
        notes: about golden itself.
    """

    comparison: GoldenComparison
    engines: Mapping[str, str]
    simulated: bool
    dtype: str
    trace: Path
    reused: bool
    model: str
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "model": self.model,
            "engines": dict(self.engines),
            "simulated": self.simulated,
            "dtype": self.dtype,
            "golden": {"engine": record.ENGINE, "dtype": record.DTYPE, "trace": str(self.trace), "reused": self.reused},
            **self.comparison.to_dict(),
            "notes": [*self.notes, *self.comparison.notes],
        }


def run_golden(
    directory: Path,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress | None = None,
    available: int | None = None,
) -> GoldenRun:
    """Record golden along the tokens of a run, unless that is done, and compare both sides with it.

    Args:
        directory: of a run with traces of both sides; golden's is written beside them.
        available: bytes of memory; measured if not given.

    Raises:
        UserError: no traces, another checkpoint than at the time, too little memory, traces that do not fit, or no
            values in them.
    """
    with ExitStack() as stack:
        traces = {role: stack.enter_context(closing(open_trace(_side(directory, role)))) for role in SIDES}
        try:
            golden, info, reused = _golden(directory, traces, say, available)
            stack.enter_context(closing(golden))
            policy = GoldenPolicy(traces["reference"].dtype, info.layers)
            with one_thread():
                compared = compare_golden(traces["candidate"], traces["reference"], golden, policy, progress)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"golden cannot be compared with {directory}: {error}", _AGAIN.format(directory)) from error
        if all(one.factor is None for one in compared.checkpoints):
            raise UserError(
                f"nothing in {directory} can be compared with golden: {compared.checkpoints[0].why}",
                f"keep values on both sides: align run --case {directory}/case.json --capture '*'",
            )
        return GoldenRun(
            comparison=compared,
            engines={role: str(trace.manifest.get("engine")) for role, trace in traces.items()},
            simulated=any(bool(trace.manifest.get("simulated")) for trace in traces.values()),
            dtype=traces["reference"].dtype,
            trace=golden.directory,
            reused=reused,
            model=info.name,
            notes=_notes(info, traces["reference"].dtype),
        )


def golden_trace(directory: Path, say: Callable[[str], None] = lambda line: None) -> Trace:
    """Golden's trace of a run, recorded now or before; whoever asks closes it.

    Raises:
        UserError: as :func:`run_golden`.
    """
    with ExitStack() as stack:
        traces = {role: stack.enter_context(closing(open_trace(_side(directory, role)))) for role in SIDES}
        try:
            return _golden(directory, traces, say, None)[0]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"golden cannot follow {directory}: {error}", _AGAIN.format(directory)) from error


def _golden(
    directory: Path, traces: Mapping[str, Trace], say: Callable[[str], None], available: int | None
) -> tuple[Trace, ModelInfo, bool]:
    """The trace, the model, and whether it was there already."""
    sequences, info = _followed(traces), _model(traces["reference"], directory)
    place = directory / GOLDEN / TRACE
    found = record.already(place, info, sequences)
    if found is not None:
        return found, info, True
    return _record(info, sequences, place, say, available), info, False


def _side(directory: Path, role: str) -> Path:
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory", "give one that align run made, as its summary names it")
    try:
        return find_trace(directory / role)
    except UserError as error:
        raise UserError(
            f"{directory} has no recording of its {role}: {error.message}", _AGAIN.format(directory)
        ) from None


def _record(
    info: ModelInfo, sequences: list[record.Followed], place: Path, say: Callable[[str], None], available: int | None
) -> Trace:
    structure = structure_of(info.config)
    parameters = size.parameter_count(info)
    needed = size.needed_bytes(parameters, structure, [len(one.ids) for one in sequences])
    size.refuse_too_large(needed, size.available_bytes() if available is None else available, parameters)
    say(f"loading {info.name} in float32: {parameters / 1e6:.1f} million parameters, about {needed / 1e9:.2f} GB")
    return record.record(record.load_model(info), info, sequences, place, say)


def _followed(traces: Mapping[str, Trace]) -> list[record.Followed]:
    """Prompts and the tokens that both sides were forced along.

    Raises:
        ValueError: they were forced along different ones, or a trace does not say.
    """
    ids: dict[str, dict[str, tuple[int, ...]]] = {}
    for role, trace in traces.items():
        forced = generations_of(trace.manifest, REPLAY)
        if forced is None:
            raise ValueError(f"the {role}'s trace does not say which tokens it followed")
        ids[role] = {one.request: one.token_ids for one in forced}
    if ids["candidate"] != ids["reference"]:
        raise ValueError("the sides followed different tokens")
    requests = traces["reference"].manifest["requests"]
    used = used_by(traces["reference"])
    found = []
    for one in requests:
        prompt, generated = tuple(one["token_ids"]), ids["reference"][one["name"]]
        experts = experts_of(used, one["name"], len(prompt) + len(generated))
        found.append(record.Followed(one["name"], prompt, generated, experts))
    return found


def _model(trace: Trace, directory: Path) -> ModelInfo:
    """The checkpoint that the sides ran, if it is still what it was."""
    then = model_info_of(trace.manifest)
    now = read_info(then.path, name=then.name, preset=then.preset)
    if now.fingerprint != then.fingerprint:
        raise UserError(
            f"the checkpoint {then.path} is not what it was when {directory} was recorded", _AGAIN.format(directory)
        )
    return now


def _notes(info: ModelInfo, dtype: str) -> tuple[str, ...]:
    stored = str(info.config.get("dtype") or info.config.get("torch_dtype") or "")
    if stored and stored != dtype:
        return (f"the weights are stored as {stored} and run as {dtype}: their rounding is part of both sides' errors",)
    return ()
