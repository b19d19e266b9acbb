"""Two recordings, judged as the joint run judges its own: conditions, stability, tokens, tensors, findings.

Directories of `.pt` files that somebody wrote by hand have no manifest; of them the tensors alone are judged, and
what either side holds is what both should hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from align.calibrate.choose import NONE
from align.case.schema import Case, parse_case
from align.checkpoints.table import structure_of
from align.compare.excused import behind_routers
from align.compare.noise import NoisePolicy
from align.compare.tokens import TokenComparison, compare_tokens
from align.conditions import RUN, Condition, SideFacts, evaluate, refuse, with_configuration
from align.errors import UserError
from align.run.arguments import judge_recordings
from align.run.audit import audit_recordings, index_faults
from align.run.certify import recorded_prompts, recorded_steps
from align.run.collectives import audit_collectives
from align.run.complete import require_rows
from align.run.diagnose import diagnose_headline
from align.run.files import refuse_unmatched, refuse_unreadable
from align.run.judge import DEFAULT_COVERAGE, judge_tensors, refuse_uncovered
from align.run.manifest import FREE, REPLAY, generations_of, model_info_of, observations_of
from align.run.plan import SideExtras
from align.run.recordings import recordings_of
from align.run.report import Report
from align.run.stability import Stability, Unstable, refuse_unstable
from align.run.together import idle_remarks
from align.run.traces import open_recording, place_of, trace_bytes
from align.run.verdict import overall_verdict
from align.trace.pt import LooseFiles
from align.trace.reader import DamagedFileError, Trace

_RECORD_AGAIN = "record both again with one case: align capture ENGINE --case FILE --out DIR [--along OTHER]"
_SHOWN_REQUESTS = 5


@dataclass
class Compared:
    """What two recordings say.

    Attributes:
        report: as a joint run's.
        engines: candidate's and reference's.
        simulated: whether any side ran on a simulated device.
        generated: ids of the free runs by role and request; empty without tokens.
    """

    report: Report
    engines: tuple[str, str]
    simulated: bool
    generated: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)


class Offline:
    """The comparison of two traces. :attr:`report` and :attr:`manifests` hold what is known, also after an error.

    Args:
        min_coverage: percent of the checkpoints without which nothing is called aligned. Files that say no model
            should hold what either side holds.
        floor: which calibrated floor narrows the derived policy.
    """

    def __init__(
        self,
        allow: Collection[str],
        policy: Literal["derived", "seed"],
        min_coverage: float = DEFAULT_COVERAGE,
        floor: str = NONE,
    ) -> None:
        self._allow, self._policy, self._floor = frozenset(allow), policy, floor
        self.report = Report(min_coverage=min_coverage)
        #: What the recordings say of themselves, by role.
        self.manifests: dict[str, Mapping[str, Any]] = {}

    def run(self, paths: Mapping[str, Path], progress: Callable[[str], None] | None = None) -> Compared:
        """Compare.

        Args:
            paths: the recordings by role.

        Raises:
            UserError: they cannot be compared; the report says so too.
        """
        try:
            with self.report.timed("read"):
                _require_two(paths)
                sides = {role: open_recording(path) for role, path in paths.items()}
            self.manifests = {role: side.manifest for role, side in sides.items()}
            self.report.remarks = _remarks(paths, self.manifests)
            self.report.extras = {role: _extras(content) for role, content in self.manifests.items()}
            with ExitStack() as stack:
                traces: dict[str, Trace] = {}
                for role, side in sides.items():
                    if isinstance(side, Trace):
                        traces[role] = stack.enter_context(closing(side))
                if len(traces) < len(sides):
                    return self._tensors_alone(sides, progress)
                try:
                    self.report.remarks = (*self.report.remarks, *idle_remarks(traces))
                    return self._run(traces, progress)
                except DamagedFileError as error:
                    raise UserError(f"could not compare: a recorded file is damaged: {error}", _RECORD_AGAIN) from error
                except (KeyError, TypeError, ValueError) as error:
                    what = f"no {error}" if isinstance(error, KeyError) else str(error)
                    raise UserError(f"a trace's manifest cannot be used: {what}", _RECORD_AGAIN) from error
        except UserError as error:
            self.report.reason, self.report.reason_told = error.message, error.told
            raise

    def _tensors_alone(
        self, sides: Mapping[str, Trace | LooseFiles], progress: Callable[[str], None] | None
    ) -> Compared:
        report = self.report
        demanded = report.min_coverage
        assert demanded is not None
        candidate, reference = sides["candidate"], sides["reference"]
        with report.timed("compare"):
            report.tensors, report.findings = judge_tensors(
                candidate, reference, self._policy, {}, progress, self._floor
            )
            report.recordings = recordings_of(sides)
        verdict = overall_verdict({}, report.findings)
        refuse_unreadable(verdict, sides)
        refuse_unmatched(verdict, report.tensors, sides, demanded)
        report.verdict = verdict
        names = tuple(str(side.manifest.get("engine") or side.directory) for side in (candidate, reference))
        return Compared(report, (names[0], names[1]), any(side.manifest.get("simulated") for side in sides.values()))

    def _run(self, traces: Mapping[str, Trace], progress: Callable[[str], None] | None) -> Compared:
        report = self.report
        manifests = {role: trace.manifest for role, trace in traces.items()}
        case = _case_of(manifests["reference"])
        _check_together(manifests)
        report.recordings = recordings_of(traces)
        report.surplus = {role: require_rows(role, trace) for role, trace in traces.items()}
        with report.timed("conditions"):
            report.conditions = self._conditions(traces, case)
            refuse(report.conditions)
        report.stability = tuple(_stability_of(role, content) for role, content in manifests.items())
        info = model_info_of(manifests["reference"])
        with report.timed("tokens"):
            refuse_unstable(report.stability)
            report.comparisons = _tokens(manifests, NoisePolicy.for_dtype(case.dtype, info.layers), case)
        with report.timed("audit"):
            report.ledgers = audit_recordings(traces)
            report.collectives = audit_collectives(traces)
        with report.timed("compare"):
            report.tensors, report.findings = judge_tensors(
                traces["candidate"],
                traces["reference"],
                self._policy,
                report.comparisons,
                progress,
                self._floor,
                index_faults(report.ledgers),
                report.collectives,
            )
        report.comparisons = behind_routers(report.comparisons, report.tensors.flipped)
        report.findings = with_configuration(report.findings, report.conditions, traces["candidate"].structure)
        judge_recordings(report, traces)
        if report.findings:
            with report.timed("diagnose"):
                report.findings, report.diagnosis = diagnose_headline(report.findings, report.tensors, [traces])
        report.bytes = {role: trace_bytes(trace.directory) for role, trace in traces.items()}
        verdict = overall_verdict(report.comparisons, report.findings)
        refuse_unreadable(verdict, traces)
        refuse_uncovered(verdict, report.tensors, report.min_coverage)
        report.verdict = verdict
        generated = {
            role: {one.request: one.token_ids for one in generations_of(content, FREE) or ()}
            for role, content in manifests.items()
        }
        return Compared(
            report=report,
            engines=(manifests["candidate"]["engine"], manifests["reference"]["engine"]),
            simulated=any(content.get("simulated") for content in manifests.values()),
            generated=generated,
        )

    def _conditions(self, traces: Mapping[str, Trace], case: Case) -> tuple[Condition, ...]:
        info = model_info_of(traces["reference"].manifest)
        # What the run that recorded them was allowed to go on without is allowed here too.
        allowed = {
            one["name"]
            for trace in traces.values()
            for one in trace.manifest.get("conditions", ())
            if one.get("allowed")
        }
        facts = {
            role: SideFacts(
                engine=trace.manifest["engine"],
                observations=observations_of(trace.manifest),
                steps=recorded_steps(trace),
                token_ids=recorded_prompts(trace),
                files=trace.manifest["checkpoint_files"],
                options=trace.manifest["spec"].get("options", {}),
            )
            for role, trace in traces.items()
        }
        structure = structure_of(info.config, case.layout.tp)
        return evaluate(case, info, structure, facts, stage=RUN, allow=allowed | self._allow)


def _extras(content: Mapping[str, Any]) -> SideExtras:
    """Patches and options that a recording was made with; a manifest that somebody edited may say none."""
    spec = content.get("spec")
    options, patches = (spec.get("options"), spec.get("patches")) if isinstance(spec, Mapping) else (None, None)
    return SideExtras(
        options if isinstance(options, Mapping) else {}, tuple(map(str, patches)) if isinstance(patches, list) else ()
    )


def _case_of(content: Mapping[str, Any]) -> Case:
    return parse_case(json.dumps(content["case"]), "the trace's case")


def _check_together(manifests: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse traces of different requests: nothing in them belongs together."""
    prompts = {
        role: {one["name"]: tuple(one["token_ids"]) for one in content["requests"]}
        for role, content in manifests.items()
    }
    if prompts["candidate"] != prompts["reference"]:
        names = sorted(
            name
            for name in prompts["candidate"].keys() | prompts["reference"].keys()
            if prompts["candidate"].get(name) != prompts["reference"].get(name)
        )
        shown = ", ".join(names[:_SHOWN_REQUESTS])
        more = "" if len(names) <= _SHOWN_REQUESTS else f" and {len(names) - _SHOWN_REQUESTS} more"
        raise UserError(f"the traces ran different prompts: request {shown}{more}", _RECORD_AGAIN)


def _require_two(paths: Mapping[str, Path]) -> None:
    """Refuse one recording given twice: it agrees with itself, which says nothing.

    Raises:
        UserError: both paths lead to the same records, or one leads nowhere.
    """
    places = {role: place_of(path) for role, path in paths.items()}
    if places["candidate"] == places["reference"]:
        raise UserError(
            f"both sides are the same recording: {places['candidate']}",
            "name the candidate's recording first and the reference's second: align compare CANDIDATE REFERENCE",
        )


def _remarks(paths: Mapping[str, Path], manifests: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Recordings that stand here for another side than the one that they were recorded as."""
    given = [manifests[role].get("side", role) for role in ("candidate", "reference")]
    if given == ["reference", "candidate"]:
        return (
            f"the sides are swapped: {paths['candidate']} was recorded as the reference, {paths['reference']} as the "
            "candidate, and the first path is called the candidate here; for the right order: "
            f"align compare {paths['reference']} {paths['candidate']}",
        )
    return tuple(
        f"{paths[role]} was recorded as the {content['side']} and is called the {role} here: the first path is the "
        "candidate, the second the reference"
        for role, content in manifests.items()
        if content.get("side", role) != role
    )


def _stability_of(role: str, content: Mapping[str, Any]) -> Stability:
    plain = dict(content["stability"])
    plain.pop("stable", None)
    unstable = plain.pop("unstable")
    found = Stability(**plain, unstable=None if unstable is None else Unstable(**unstable))
    return replace(found, side=role)


def _tokens(manifests: Mapping[str, Mapping[str, Any]], policy: NoisePolicy, case: Case) -> dict[str, TokenComparison]:
    """The comparisons of the joint run, from what each side recorded of its own."""
    lengths = {request.name: len(request.token_ids) for request in case.requests}
    free = {role: generations_of(content, FREE) for role, content in manifests.items()}
    forced = {role: generations_of(content, REPLAY) for role, content in manifests.items()}
    peaks = [step.peak for side in free.values() for one in side or () for step in one.steps]
    policy = policy.at(max(peaks, default=0.0), case.dtype)
    found: dict[str, TokenComparison] = {}
    for mode, sides in (("free", free), ("replay", forced)):
        candidate, reference = sides["candidate"], sides["reference"]
        if candidate is None or reference is None:
            raise UserError(f"a trace holds no tokens of its {mode} run", _RECORD_AGAIN)
        followed = [{one.request: one.token_ids for one in side} for side in (candidate, reference)]
        if mode == "replay" and followed[0] != followed[1]:
            raise UserError(
                "the traces follow different tokens, so their tensors do not belong together",
                "record one along the other: align capture ENGINE --case FILE --along A --out DIR",
            )
        found[mode] = compare_tokens(
            candidate,
            reference,
            mode="free" if mode == "free" else "replay",
            policy=policy,
            prompt_lengths=lengths,
        )
    return found
