"""The summary after a run or a comparison, for one screen: the verdict, what it rests on, what to do next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from tokenizers import Tokenizer

from align.attention.audit import Audited as Arguments
from align.case.schema import Case
from align.collectives.audit import Audited as Collectives
from align.compare.routes import reach_told
from align.compare.tensors import TensorComparison
from align.ledger.sides import Audited
from align.models.info import ModelInfo
from align.report.again import measures, suspects
from align.report.conditions import show_conditions, show_settings
from align.report.reach import begin_at
from align.report.size import size_text
from align.report.tensors import show_tensors
from align.report.tokens import show_differences, show_tokens
from align.result.paired import Paired
from align.run.outcome import Outcome
from align.run.report import Report
from align.sentences import said, text_of

#: Presets whose weights are random: what they say is no language.
RANDOM_MODELS = ("qwen3", "qwen3-mqa", "qwen3-moe", "qwen2-moe", "mistral", "gemma2")
_SHOWN_FINDINGS = 5


def decoder(info: ModelInfo) -> Callable[[Sequence[int]], str] | None:
    """From ids to text, or ``None`` where text means nothing (random weights) or no fast tokenizer is there."""
    file = info.path / "tokenizer.json"
    if not file.is_file() or info.name in RANDOM_MODELS:
        return None
    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def show_summary(
    console: Console,
    case: Case,
    info: ModelInfo,
    outcome: Outcome,
    report: Report,
    directory: Path,
    verbose: bool = False,
    reports: Sequence[str] = ("report.md",),
    paired: Paired | None = None,
) -> None:
    """A joint run; ``reports`` are the names of the documents that it leaves, ``paired`` is what a replay says."""
    generated = {
        role: {g.request: g.token_ids for g in side.free.generations} if side.free is not None else {}
        for role, side in outcome.sides.items()
    }
    if "free" in report.comparisons:  # a finding may end a run before there are tokens
        show_tokens(console, report.comparisons["free"], generated, decoder(info))
    simulated = any(side.launched is not None and side.launched.simulated for side in outcome.sides.values())
    if not report.conditions:
        show_settings(console, outcome)
    show_findings(console, report, case.candidate, case.reference, simulated, verbose, "written")
    show_paired(console, paired)
    traces = " and ".join(str(directory / role) for role in outcome.sides)
    console.print(
        f"run directory: {escape(str(directory))} ({', '.join((*reports, 'result.json'))})",
        highlight=False,
        soft_wrap=True,
    )
    if report.tensors is not None:
        again = escape(traces.replace(" and ", " "))
        console.print(f"judge it again: align compare {again}", highlight=False, soft_wrap=True)
    repeat = f"CASE={directory / 'case.json'}"
    console.print(f"next: {escape(next_step(report, repeat))}", highlight=False, soft_wrap=True)


def say_in_short(
    report: Report,
    engines: tuple[str, str],
    simulated: bool,
    directory: Path,
    next_step: str,
    paired: Paired | None = None,
) -> None:
    """``--quiet``: the verdict, of a replay what became of the earlier run, and a line that says where the rest is."""
    print(f"{report.verdict}{' (simulated)' if simulated else ''}: {sentence(*engines, report)}")
    if report.reason:
        print(f"ended early: {report.reason}")
    if paired is not None:
        print(paired.what)
    print(f"run directory: {directory} · next: {next_step}")


def show_comparison(
    console: Console,
    engines: tuple[str, str],
    report: Report,
    simulated: bool,
    generated: Mapping[str, Mapping[str, tuple[int, ...]]],
    verbose: bool = False,
    paired: Paired | None = None,
) -> None:
    """A comparison of two traces; the same words as the joint run's."""
    if generated and "free" in report.comparisons:
        show_tokens(console, report.comparisons["free"], generated, None)
    show_findings(console, report, *engines, simulated, verbose, "read")
    show_paired(console, paired)
    console.print(f"next: {escape(next_step(report))}", highlight=False, soft_wrap=True)


def show_paired(console: Console, paired: Paired | None) -> None:
    """What became of the run that a replay repeats."""
    if paired is not None:
        console.print(f"[bold]paired run[/bold]: {escape(paired.what)}", highlight=False, soft_wrap=True)


def show_findings(
    console: Console, report: Report, candidate: str, reference: str, simulated: bool, verbose: bool, traces: str
) -> None:
    """Everything between the tokens and the next step; ``traces`` says what was done with them."""
    show_differences(console, report.comparisons)
    for one in report.stability:
        noise = "not measured" if one.noise is None else f"{one.noise:.3g}"
        again = "repeats its tokens" if one.stable else "does not repeat its tokens"
        if one.near_ties:
            again += f" but for {one.near_ties} near-tie{'' if one.near_ties == 1 else 's'}, after prefix hits"
        console.print(f"the {one.side} {again}; run-to-run noise of its logprobs: {noise}", highlight=False)
    show_conditions(console, report.conditions, verbose)
    if report.tensors is not None:
        show_tensors(console, report.tensors, report.findings, verbose, report.surplus)
    if report.ledgers:
        told = "; ".join(_ledger_words(role, one) for role, one in report.ledgers.items())
        console.print(f"cache indices: {escape(told)}", highlight=False, soft_wrap=True)
    if report.collectives:
        told = "; ".join(_collective_words(role, one) for role, one in report.collectives.items())
        console.print(f"collectives: {escape(told)}", highlight=False, soft_wrap=True)
    if report.arguments:
        told = "; ".join(_argument_words(role, one) for role, one in report.arguments.items())
        console.print(f"attention arguments: {escape(told)}", highlight=False, soft_wrap=True)
    if report.bytes:
        sizes = ", ".join(f"{role} {size_text(count)}" for role, count in report.bytes.items())
        console.print(f"traces {traces}: {sizes}", highlight=False)
    if simulated:
        console.print(
            "numbers are simulated: both engines ran their real code over a simulated NPU; "
            "this says nothing about an NPU's own kernels",
            style="dim",
            highlight=False,
        )
    if report.remarks or (report.reason and report.verdict == "diverged"):
        console.print()
    if report.reason and report.verdict == "diverged":
        console.print(
            f"[bold yellow]ended early:[/bold yellow] {escape(report.reason)}", highlight=False, soft_wrap=True
        )
    for remark in report.remarks:
        console.print(f"[bold yellow]warning:[/bold yellow] {escape(remark)}", highlight=False, soft_wrap=True)
    colour = "green" if report.verdict == "aligned" else "red"
    text = sentence(candidate, reference, report)
    console.print(f"\n[bold {colour}]{report.verdict}[/bold {colour}]: {escape(text)}", highlight=False, soft_wrap=True)
    further = report.findings[1:] if _headlines(report) else report.findings
    for finding in further[:_SHOWN_FINDINGS]:
        console.print(f"  {escape(finding.summary)}", highlight=False, soft_wrap=True)
    if len(further) > _SHOWN_FINDINGS:
        console.print(f"  … and {len(further) - _SHOWN_FINDINGS} more findings in run.json", highlight=False)
    for line in _walked(report):
        console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
    for transplant in report.transplants:
        console.print(f"  {escape(transplant.summary)}", highlight=False, soft_wrap=True)
    if report.tainted:
        names = ", ".join(condition.name for condition in report.tainted)
        console.print(
            f"[yellow]this rests on conditions that do not hold and were allowed: {names}[/yellow]", highlight=False
        )


def _ledger_words(role: str, one: Audited) -> str:
    """What the audit of a side came to; what could not be judged is no pass."""
    if not one.observable:
        return f"{role} not observable ({one.unseen[0]})"
    found = f"{one.faults} fault{'' if one.faults == 1 else 's'}" if one.faults else "all right"
    rest = f", not all judged: {one.unseen[0]}" if one.unseen else ""
    return f"{role} {found} in {one.records} records of {len(one.runs)} runs{rest}"


def _collective_words(role: str, one: Collectives) -> str:
    """What the audit of a side's collectives came to; what could not be judged is no pass."""
    if not one.observable:
        return f"{role} not observable ({one.unseen[0]})"
    counts: dict[str, int] = {}
    for row in one.rows:
        counts[row.operation] = counts.get(row.operation, 0) + row.right + row.wrong
    judged = ", ".join(f"{count} {operation}" for operation, count in counts.items() if count)
    found = f"{one.faults} fault{'' if one.faults == 1 else 's'}" if one.faults else "all right"
    wrong = ", ".join(
        f"{row.wrong} {row.operation} on rank {', '.join(map(str, row.ranks))}" for row in one.rows if row.wrong
    )
    rest = f", not all judged: {one.unseen[0]}" if one.unseen else ""
    return f"{role} {found}{f' ({wrong})' if wrong else ''} of {judged or 'none'}{rest}"


def _argument_words(role: str, one: Arguments) -> str:
    """What the rules say of a side's calls; what could not be judged is no pass."""
    if not one.observable:
        return f"{role} not observable ({one.unseen[0]})"
    counts = {name: len(one.of(name)) for name in ("ERROR", "WARN", "REMIND", "INFO")}
    open_ = sum(not group.known for group in one.of("WARN"))
    broken = ", ".join(
        f"{count} {name}" + (f" ({open_} not explained)" if name == "WARN" else "")
        for name, count in counts.items()
        if count
    )
    rest = f", not all judged: {one.unseen[0]}" if one.unseen else ""
    return f"{role} {broken or 'all right'} in {one.calls} calls ({one.distinct} different){rest}"


def _walked(report: Report) -> Iterator[str]:
    """What was tried after the first finding, in short; the report has the rest."""
    if report.alone is not None:
        told = "shows the same" if report.alone.reproduced else "does not show it: look at what a batch changes"
        yield f"request {report.alone.request} by itself {told}"
        pair = report.alone.pair
        if pair is not None:
            tried = f"no pair of it with {', '.join(pair.tried)} shows it"
            yield f"requests {' and '.join(pair.requests)} together show it" if pair.requests else tried
    found = report.diagnosis
    if found is not None:
        yield f"in float64: {found.why}"
        if found.fits:
            yield f"kind of fault: {found.fits[0].text}"


def _headlines(report: Report) -> bool:
    """Whether the first finding says more than that the tokens differ."""
    return bool(report.findings) and report.findings[0].kind != "tokens"


def sentence(candidate: str, reference: str, report: Report) -> str:
    """The verdict in words, and what a side alone ran with, without which the verdict may be another."""
    extras = report.extras
    found = measures(
        {side: one.patches for side, one in extras.items()}, {s: tuple(one.options) for s, one in extras.items()}
    )
    tail = f"; with {text_of(said('list.semicolon', parts=found))}" if found else ""
    return _verdict(candidate, reference, report) + tail


def _verdict(candidate: str, reference: str, report: Report) -> str:
    pair = f"{candidate} and {reference}"
    if _headlines(report):
        first = report.findings[0]
        more = len(report.findings) - 1
        tail = "" if not more else f" (and {more} more finding{'s' if more > 1 else ''})"
        return first.summary.rstrip(".") + tail
    free = report.comparisons.get("free")
    if free is None:
        what = "the same bits" if _equal(report) else "within what rounding allows"
        assert report.tensors is not None, "without tokens there are tensors"
        left = f"{_unjudged_words(report)}{_router_words(report.tensors)}"
        return f"{pair} agree in every tensor that both recorded ({what}){left}"
    tokens = sum(request.total for request in free.requests)
    if report.verdict == "aligned":
        ties = report.comparisons.get("replay", free).near_ties
        tensors = _tensors_words(report)
        if not ties:
            count = len(free.requests)
            requests = f"{count} request{'' if count == 1 else 's'}"
            return f"{pair} generate the same {tokens} greedy token{'' if tokens == 1 else 's'} for {requests}{tensors}"
        return f"{pair} differ at {len(ties)} of {tokens} greedy tokens, at each by a near-tie{tensors}"
    replay = report.comparisons.get("replay")
    difference = (replay.first if replay is not None else None) or free.first
    assert difference is not None, "a diverged comparison has a first difference"
    phase = "the first token, so prefill" if difference.index == 0 else f"token {difference.index}, in decode"
    return f"{pair} first differ at {phase}, of request {difference.request}"


def _tensors_words(report: Report) -> str:
    if report.tensors is None:
        return ""
    words = "equal" if _equal(report) else "within what rounding allows"
    partial = "" if report.tensors.coverage["paired"].percent == 100 else " that was compared"
    return f", and every tensor{partial} is {words}{_unjudged_words(report)}{_router_words(report.tensors)}"


def _router_words(tensors: TensorComparison) -> str:
    """What near-ties of routers leave open."""
    if tensors.routing is None:
        return ""
    return text_of(reach_told("short_", len(tensors.flips), tensors.routing))


def _equal(report: Report) -> bool:
    """Whether all tensors that were compared have the same bits."""
    assert report.tensors is not None
    return {one.verdict for one in report.tensors.checkpoints if one.compared} == {"equal"}


def _unjudged_words(report: Report) -> str:
    """What a pass leaves open where carried tensors alone were judged, by bounds as wide as all layers' rounding."""
    assert report.tensors is not None
    added = [one for checkpoint in report.tensors.checkpoints for one in checkpoint.added.values()]
    judged = any(one.verdict != "not observable" for one in added)
    if judged or _equal(report) or report.tensors.policy.name == "seed":
        return ""
    return (
        "; operators could not be judged: no inputs or weights; only differences beyond the wide bounds would be seen; "
        "--policy seed judges by 1e-3, as the project's alignment guide does"
    )


def next_step(report: Report, repeat: str = "") -> str:
    """What to do now."""
    if report.findings and report.findings[0].next:
        first = report.findings[0]
        place = begin_at(first)
        given = report.extras.get(first.side or "")
        suspect = suspects(() if given is None else given.patches, first.side, place)
        more = "" if suspect is None else f"; {text_of(suspect)}"
        return first.next + (f"; begin at {place}" if place else "") + more
    if report.verdict == "aligned" and not report.comparisons:
        return (
            "record both engines, so that tokens, conditions and each operator are judged as well: "
            "align capture ENGINE --case FILE --out DIR"
        )
    if report.verdict == "aligned":
        return "score the model with OpenCompass or EvalScope; or try other prompts with PROMPTS=file.jsonl"
    again = f"repeat it with {repeat}, " if repeat else "record the case again, "
    return again + "one request at a time, to see which request needs the batch"
