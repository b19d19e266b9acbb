"""The order of a joint run: conditions, stability, tokens, then tensors along the reference's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

from adapters.base import RunResult
from adapters.probe.spec import CaptureSpec, TransplantSpec
from align.case.schema import Case
from align.checkpoints.table import Structure
from align.compare.excused import behind_routers
from align.compare.noise import NoisePolicy
from align.compare.tokens import compare_tokens
from align.conditions import refuse, with_configuration
from align.errors import SideError, UserError
from align.findings import Finding
from align.models.info import ModelInfo
from align.run.arguments import ended_by_arguments, judge_recordings, judge_run, keep_arguments
from align.run.audit import index_faults, keep_and_audit
from align.run.certify import Certifier, recorded_prompts
from align.run.closer import CLOSER, PAIR, record_alone
from align.run.collectives import RanksPart, audit_collectives, keep_calls
from align.run.complete import require_rows
from align.run.confirm import Confirmer, check_accusations, tested
from align.run.diagnose import diagnose_headline
from align.run.judge import judge_tensors, refuse_uncovered
from align.run.manifest import manifest, write_manifest
from align.run.recording import check_lean, first_look, rows_by_request
from align.run.recordings import recordings_of
from align.run.repeats import check_repeats
from align.run.report import Report
from align.run.routing import GIVEN, can_follow, choices_of, wants_routing
from align.run.session import Session
from align.run.together import idle_remarks, torn_remarks
from align.run.traces import TRACE, open_trace, trace_bytes
from align.run.verdict import overall_verdict
from align.run.wishes import Wishes as Wishes
from align.run.wishes import check_recordable as check_recordable
from align.run.wishes import structure_or_none
from align.trace.format import MANIFEST
from align.walk.alone import Alone
from align.walk.diagnosis import Diagnosis
from align.walk.pairs import find_pair
from align.walk.planner import Look, first_look_closer, headline_of, look_after_alone
from align.walk.transplant import accusation_in, known_of


class Flow:
    """One joint run. :attr:`report` holds what is known, also after an error.

    Args:
        session: not yet entered; it has both sides.
        keep: called when there are new tokens, which should outlive whatever comes next.
    """

    def __init__(
        self, session: Session, case: Case, info: ModelInfo, wishes: Wishes, keep: Callable[[], None] = lambda: None
    ) -> None:
        self._session, self._case, self._info, self._wishes, self._keep = session, case, info, wishes, keep
        self._about = session, case, info
        self._structure = check_recordable(info, case.layout.tp) if wishes.tensors else None
        self._certifier = Certifier(case, info, structure_or_none(info, case.layout.tp), wishes.allow)
        check_accusations(wishes.accusations, self._structure)
        check_lean(wishes.lean and wishes.tensors, case.layout.tp)
        #: Experts that the candidate uses instead of its own choice.
        self._routing: TransplantSpec | None = None
        #: An engine failed in a closer look, and is asked nothing more.
        self._lost = False
        self.report = Report(
            min_coverage=wishes.min_coverage if wishes.tensors else None,
            extras={role: side.extras for role, side in session.outcome.sides.items()},
        )

    def run(self) -> Report:
        """Run to the verdict.

        Raises:
            UserError: what stopped it; the report says so too.
        """
        report = self.report
        try:
            with self._session:
                self._stages()
            judge_run(report, *self._about)
            verdict = overall_verdict(report.comparisons, report.findings)
            if self._structure is not None:
                refuse_uncovered(verdict, report.tensors, report.min_coverage)
            report.verdict = verdict
        except RanksPart as error:  # what could not be run any more does not take it back
            report.findings, report.verdict = (error.finding, *report.findings), "diverged"
            judge_run(report, *self._about)
        except UserError as error:
            report.reason, report.reason_told = error.message, error.told
            if not ended_by_arguments(report, *self._about, error):
                raise
            report.verdict = "diverged"
        return report

    def _stages(self) -> None:
        session, report = self._session, self.report
        with report.timed("launch"):
            session.launch()
        with report.timed("conditions"):
            self._certify()
        with report.timed("generate"):
            try:
                session.generate()
            except RanksPart:
                raise
            except SideError as error:
                self._blame_conditions(error.side)
                raise
            session.observe()
        self._keep()
        with report.timed("conditions"):
            self._certify(ran=True)
        with report.timed("generate again"):
            session.generate_again()
        lengths = {request.name: len(request.token_ids) for request in self._case.requests}
        check_repeats(session, report, lengths, self._noise_policy(), self._wishes.fresh)
        self._compare("free", {role: side.free for role, side in session.outcome.sides.items()})
        if report.findings:
            return  # a side does not repeat itself, and its indices say why
        report.findings = with_configuration((), report.conditions, self._structure)
        if self._structure is not None:
            self._tensors(self._structure)
        elif self._wants_replay():
            with report.timed("replay"):
                session.replay(self._wishes.along)
            self._compare("replay", {role: side.replay for role, side in session.outcome.sides.items()})

    def _certify(
        self, ran: bool = False, inputs: Mapping[str, Mapping[str, Sequence[int | None]] | None] | None = None
    ) -> None:
        self.report.conditions = self._certifier.judge(self._session.outcome.sides, ran=ran, inputs=inputs)
        refuse(self.report.conditions)

    def _blame_conditions(self, role: str) -> None:
        """A side may fail because of a condition; then that is what has to change.

        Raises:
            UserError: a condition that is false and not allowed.
        """
        try:
            self._session.observe_again(role)
        except SideError:
            return  # it is gone, and its failure is all that is known
        self.report.conditions = self._certifier.judge(self._session.outcome.sides, ran=True)
        refuse([condition for condition in self.report.conditions if condition.verdict == "false"])

    def _wants_replay(self) -> bool:
        differ = bool(self.report.comparisons["free"].differences)
        return self._wishes.replay == "always" or (self._wishes.replay == "auto" and differ)

    # ------------------------------------------------------------------------------------------------------ tokens

    def _compare(self, mode: Literal["free", "replay"], results: Mapping[str, RunResult | None]) -> None:
        candidate, reference = results["candidate"], results["reference"]
        assert candidate is not None and reference is not None
        self.report.comparisons[mode] = compare_tokens(
            candidate.generations,
            reference.generations,
            mode=mode,
            policy=self._noise_policy(),
            prompt_lengths={request.name: len(request.token_ids) for request in self._case.requests},
        )

    def _noise_policy(self) -> NoisePolicy:
        """The dtype's, for logits as large as the free run's."""
        policy = NoisePolicy.for_dtype(self._case.dtype, self._info.layers)
        free = [side.free for side in self._session.outcome.sides.values() if side.free is not None]
        return policy.at(peak_of(free), self._case.dtype)

    # ----------------------------------------------------------------------------------------------------- tensors

    def _tensors(self, structure: Structure) -> None:
        wishes, report = self._wishes, self.report
        requests = self._session.forced(wishes.along)
        directories = {role: self._session.directories[role] / TRACE for role in self._session.roles}
        looks = {
            role: first_look(directory, self._of(role), requests, wishes.budget, wishes.values, wishes.lean)
            for role, directory in directories.items()
        }
        with report.timed("record"):
            self._session.replay(wishes.along, looks)
        self._keep()
        self._compare("replay", {role: side.replay for role, side in self._session.outcome.sides.items()})
        self._judge(directories)
        self._replay_routing(looks, directories)
        look = first_look_closer(
            report.findings,
            report.tensors,
            report.comparisons["replay"],
            [request.name for request in self._case.requests],
            structure,
            looks["candidate"].values,
            rows_by_request(self._case) if wishes.lean else None,
        )
        if look is not None and look.kind == "alone":
            with report.timed("record alone"):
                self._alone(look)
            if report.alone is not None:
                look = look_after_alone(look, report.alone.reproduced, looks["candidate"].values)
        if look is not None and not self._lost:
            self._together(look, looks, directories)
        if report.findings:
            with report.timed("diagnose"):
                self._session.say("diagnose", "the first finding, in float64")
                report.findings, report.diagnosis = self._diagnosed(directories)
        self._confirm(directories)

    def _replay_routing(self, looks: dict[str, CaptureSpec], directories: Mapping[str, Path]) -> None:
        """The candidate once more, along the reference's choice of experts, where near-ties hide rows."""
        report, candidate = self.report, "candidate"
        if not can_follow(self._case.layout) or not wants_routing(
            self._wishes.routing, report.tensors, report.findings
        ):
            return
        given = choices_of(directories["reference"], self._session.directories[candidate] / GIVEN)
        if given is None:
            return
        self._routing = given
        looks[candidate] = replace(looks[candidate], routing=given)
        (directories[candidate] / MANIFEST).unlink()  # as in _together
        with report.timed("replay routing"):
            self._session.replay(self._wishes.along, {candidate: looks[candidate]}, only=candidate)
        self._keep()
        self._compare("replay", {role: side.replay for role, side in self._session.outcome.sides.items()})
        self._judge(directories)

    def _of(self, role: str) -> Structure:
        """What the model has in the layout of one side."""
        return check_recordable(self._info, self._case.at(role).layout.tp)

    def _diagnosed(self, directories: Mapping[str, Path]) -> tuple[tuple[Finding, ...], Diagnosis | None]:
        """With the recording of the whole batch, or else with that of the request alone."""
        report = self.report
        places = [directories]
        if report.alone is not None:
            places.append({role: self._session.directories[role] / CLOSER for role in directories})
        with ExitStack() as stack:
            recordings = [
                {role: stack.enter_context(closing(open_trace(path))) for role, path in place.items()}
                for place in places
            ]
            return diagnose_headline(report.findings, report.tensors, recordings)

    def _alone(self, look: Look) -> None:
        """The request that shows it by itself, with the values that tell more (seed 003: a single request first)."""
        report = self.report
        headline = headline_of(report.findings, look.checkpoint)
        try:
            report.alone = self._apart(look, headline, CLOSER)
        except SideError as error:
            self._lose(f"{look.requests[0]} could not be run by itself", error)
            return
        if not report.alone.reproduced:
            requests = [request.name for request in self._case.requests]
            try:
                pair = find_pair(look, headline, requests, lambda two: self._apart(two, headline, PAIR))
            except SideError as error:
                self._lose("two requests by themselves could not be tried", error)
            else:
                report.alone = replace(report.alone, pair=pair)

    def _lose(self, what: str, error: SideError) -> None:
        """An engine failed in a closer look: what was found before stands.

        Raises:
            SideError: nothing was found.
        """
        if not self.report.findings:
            raise error
        self._lost = True
        self.report.remarks = (*self.report.remarks, f"{what}: {error.message}")

    def _apart(self, look: Look, headline: Finding | None, place: str) -> Alone:
        """Some requests without the others."""
        report, names = self.report, " and ".join(look.requests)
        return record_alone(
            self._session,
            self._case,
            self._info,
            look,
            headline,
            place=place,
            along=self._wishes.along,
            policy=self._wishes.policy,
            floor=self._wishes.floor,
            lean=self._wishes.lean,
            routing=self._routing,
            checkpoint_files=self._certifier.files(self._info.path),
            stable={one.side: one for one in report.stability},
            say=lambda where: self._session.say("compare", f"{names} alone: {where}"),
        )

    def _together(self, look: Look, looks: Mapping[str, CaptureSpec], directories: Mapping[str, Path]) -> None:
        """The whole batch once more, with the values that tell more: it takes the place of the first recording."""
        again = {role: replace(first, values=(*first.values, *look.values)) for role, first in looks.items()}
        for directory in directories.values():
            # A trace without its manifest is none: a second recording that breaks off must not look whole.
            (directory / MANIFEST).unlink()
        with self.report.timed("record again"):
            self._session.replay(self._wishes.along, again)
        self._judge(directories, look=2)

    def _confirm(self, directories: Mapping[str, Path]) -> None:
        """Transplants: at what is accused first, and where the user wants one."""
        report = self.report
        if self._lost:
            return
        headline = accusation_in(report.findings, self._structure) if self._wishes.confirm else None
        confirmer = Confirmer(self._session, directories, self._wishes.along, self._routing)
        for accusation in dict.fromkeys((*([] if headline is None else [headline]), *self._wishes.accusations)):
            with report.timed("confirm"):
                known = known_of(accusation, report.tensors, report.findings)
                result = confirmer.confirm(replace(accusation, known=known))
                report.transplants = (*report.transplants, result)
                if accusation == headline:
                    report.findings = tuple(tested(one, accusation, result) for one in report.findings)

    def _judge(self, directories: Mapping[str, Path], look: int = 1) -> None:
        report = self.report
        with report.timed("audit"):
            self._session.say("audit", "every index of the cache")
            report.ledgers = keep_and_audit(self._session.directories, directories)
            for role, directory in directories.items():
                keep_calls(self._session.directories[role], directory)
                keep_arguments(self._session.directories[role], directory)
        self._session.say("compare", "tensors, from layer 0 upward")
        with report.timed("compare"), ExitStack() as stack:
            self._write_manifests(directories, look)
            traces = {
                role: stack.enter_context(closing(open_trace(directory))) for role, directory in directories.items()
            }
            report.recordings = recordings_of(traces)
            report.surplus = {role: require_rows(role, trace) for role, trace in traces.items()}
            results = {role: side.replay for role, side in self._session.outcome.sides.items()}
            new = (*idle_remarks(traces), *torn_remarks(results))
            report.remarks = tuple(dict.fromkeys((*report.remarks, *new)))
            self._certify(ran=True, inputs={role: recorded_prompts(trace) for role, trace in traces.items()})
            self._write_manifests(directories, look)  # with what the recorded inputs say about the conditions
            report.bytes = {role: trace_bytes(directory) for role, directory in directories.items()}
            report.collectives = audit_collectives(traces)
            report.tensors, report.findings = judge_tensors(
                traces["candidate"],
                traces["reference"],
                self._wishes.policy,
                report.comparisons,
                lambda where: self._session.say("compare", where),
                self._wishes.floor,
                index_faults(report.ledgers),
                report.collectives,
            )
            report.comparisons = behind_routers(report.comparisons, report.tensors.flipped)
            report.findings = with_configuration(report.findings, report.conditions, self._structure)
            judge_recordings(report, traces)

    def _write_manifests(self, directories: Mapping[str, Path], look: int) -> None:
        stable = {one.side: one for one in self.report.stability}
        for role, directory in directories.items():
            content = manifest(
                role,
                self._case,
                self._info,
                self._session.outcome.sides[role],
                work_dir=self._session.directories[role],
                checkpoint_files=self._certifier.files(self._info.path),
                stable=stable[role],
                conditions=[condition.to_dict() for condition in self.report.conditions],
                look=look,
            )
            write_manifest(directory, content)


def peak_of(results: Iterable[RunResult]) -> float:
    """The largest logit magnitude that the runs recorded."""
    return max(
        (step.peak for result in results for generation in result.generations for step in generation.steps), default=0.0
    )
