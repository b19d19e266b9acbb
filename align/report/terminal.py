"""The prompts before a run and the summary after it, for one screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tokenizers import Tokenizer

from align.case.prompts import EncodedPrompt
from align.case.schema import Case
from align.compare.tokens import Difference, TokenComparison
from align.models.info import ModelInfo
from align.run.session import Outcome

_SHOWN_IDS = 12
_SHOWN_TOKENS = 8
_SHOWN_TEXT = 120
_SHOWN_DIFFERENCES = 8

#: Presets whose weights are random: what they say is no language.
RANDOM_MODELS = ("qwen3",)

#: Settings worth a line of their own, by the name adapters give them.
_CONDITIONS = ("dtype", "tp", "block_size", "eager", "prefix_caching", "soc_version", "numerics")


def ids_text(ids: Sequence[int], limit: int = _SHOWN_IDS) -> str:
    """Ids as text, the middle left out where there are many."""
    if len(ids) <= limit:
        return " ".join(map(str, ids))
    head, tail = limit - limit // 3, limit // 3
    return f"{' '.join(map(str, ids[:head]))} … {' '.join(map(str, ids[len(ids) - tail :]))}"


def show_prompts(console: Console, prompts: Sequence[EncodedPrompt], verbose: bool) -> None:
    """Each prompt with its exact ids, its special tokens, and what looks wrong about it."""
    table = Table(title="prompts", title_justify="left", box=None, pad_edge=False)
    for column in ("request", "from", "tokens", "ids", "special"):
        table.add_column(column, justify="right" if column == "tokens" else "left", overflow="fold")
    for prompt in prompts:
        special = " ".join(f"{token.token}={token.token_id}" for token in prompt.special) or "-"
        ids = ids_text(prompt.token_ids, len(prompt.token_ids) if verbose else _SHOWN_IDS)
        table.add_row(prompt.name, prompt.source, str(len(prompt.token_ids)), ids, escape(special))
    console.print(table)
    for prompt in prompts:
        if prompt.rendered is not None and (verbose or prompt.source in ("text", "messages")):
            text = prompt.rendered if verbose else prompt.rendered[:_SHOWN_TEXT]
            more = "" if len(text) == len(prompt.rendered) else " …"
            console.print(f"  {prompt.name} as the model reads it: {escape(repr(text))}{more}", highlight=False)
        for warning in prompt.warnings:
            console.print(f"[yellow]  {prompt.name}: {escape(warning)}[/yellow]", highlight=False)
    console.print()


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
    comparisons: dict[str, TokenComparison],
    verdict: str,
    directory: Path,
) -> None:
    """The verdict in a sentence, tokens per request, flips, conditions, and what to do next."""
    free = comparisons["free"]
    _show_tokens(console, outcome, free, decoder(info))
    compared = comparisons.get("replay", free)
    # What a replay does not repeat is known from the free run alone.
    differences = compared.differences or free.differences
    if differences:
        where = (
            "teacher-forced along the reference" if compared.differences and compared is not free else "free-running"
        )
        console.print(f"differences ({where}):", highlight=False)
        # What counts first: real differences before near-ties, early tokens before late ones.
        ranked = sorted(differences, key=lambda one: (one.near_tie, one.index))
        for difference in ranked[:_SHOWN_DIFFERENCES]:
            console.print(f"  {escape(describe(difference))}", highlight=False)
        if len(ranked) > _SHOWN_DIFFERENCES:
            console.print(f"  … and {len(ranked) - _SHOWN_DIFFERENCES} more in run.json", highlight=False)
    if compared.noise_above_cap:
        console.print(
            f"[yellow]logprobs differ by up to {compared.noise:.3g}, more than rounding explains "
            f"({compared.policy.cap:.3g}): tokens alone would not show a small fault[/yellow]",
            highlight=False,
        )
    _show_conditions(console, outcome)
    simulated = any(side.launched is not None and side.launched.simulated for side in outcome.sides.values())
    if simulated:
        console.print(
            "numbers are simulated: both engines ran their real code over a simulated NPU; "
            "this says nothing about an NPU's own kernels",
            style="dim",
            highlight=False,
        )
    colour = "green" if verdict == "aligned" else "red"
    console.print(f"\n[bold {colour}]{verdict}[/bold {colour}]: {escape(sentence(case, comparisons, verdict))}")
    console.print(f"run directory: {escape(str(directory))}", highlight=False, soft_wrap=True)
    console.print(f"next: {escape(next_step(comparisons, verdict, directory))}", highlight=False, soft_wrap=True)


def _show_tokens(
    console: Console, outcome: Outcome, free: TokenComparison, decode: Callable[[Sequence[int]], str] | None
) -> None:
    table = Table(title="greedy tokens", title_justify="left", box=None, pad_edge=False)
    for column in ("request", "result", "same from the start", "candidate", "reference"):
        table.add_column(column, justify="right" if "same" in column else "left", overflow="fold")
    generated = {
        role: {g.request: g.token_ids for g in side.free.generations} if side.free is not None else {}
        for role, side in outcome.sides.items()
    }
    for request in free.requests:
        candidate, reference = (generated[role][request.request] for role in ("candidate", "reference"))
        equal = next(
            (i for i, (a, b) in enumerate(zip(candidate, reference, strict=False)) if a != b),
            min(len(candidate), len(reference)),
        )
        same = candidate == reference
        table.add_row(
            request.request,
            request.outcome.replace("_", "-"),
            f"{equal}/{request.total}",
            ids_text(candidate, _SHOWN_TOKENS),
            "same" if same else ids_text(reference, _SHOWN_TOKENS),
        )
    console.print(table)
    if decode is not None:
        for request in free.requests:
            for role, ids in generated.items():
                if role == "candidate" or ids[request.request] != generated["candidate"][request.request]:
                    text = repr(decode(ids[request.request]))
                    console.print(f"  {request.request} {role} says {escape(text)}", highlight=False)


def _show_conditions(console: Console, outcome: Outcome) -> None:
    table = Table(title="read back from the engines", title_justify="left", box=None, pad_edge=False)
    for column in ("setting", *outcome.sides):
        table.add_column(column)
    for name in _CONDITIONS:
        row = []
        for side in outcome.sides.values():
            seen = [observation for observation in side.observations if observation.name == name]
            row.append("unknown" if not seen or seen[0].value is None else escape(str(seen[0].value)))
        table.add_row(name, *row)
    console.print(table)


def describe(difference: Difference) -> str:
    """One difference as a line."""
    what = "near-tie" if difference.near_tie else difference.kind
    return (
        f"{difference.request} token {difference.index}: candidate {difference.candidate_id}, "
        f"reference {difference.reference_id} ({what}: {difference.why})"
    )


def sentence(case: Case, comparisons: dict[str, TokenComparison], verdict: str) -> str:
    """The verdict in words."""
    pair = f"{case.candidate} and {case.reference}"
    free = comparisons["free"]
    tokens = sum(request.total for request in free.requests)
    if verdict == "aligned":
        ties = comparisons.get("replay", free).near_ties
        if not ties:
            return f"{pair} generate the same {tokens} greedy tokens for {len(free.requests)} requests"
        return (
            f"{pair} differ at {len(ties)} of {tokens} greedy tokens, at each by a near-tie within the measured noise"
        )
    first = comparisons["replay"].first if "replay" in comparisons else None
    first = first or free.first
    assert first is not None, "a diverged comparison has a first difference"
    phase = "the first token, so prefill" if first.index == 0 else f"token {first.index}, in decode"
    return f"{pair} first differ at {phase}, of request {first.request}"


def next_step(comparisons: dict[str, TokenComparison], verdict: str, directory: Path) -> str:
    if verdict == "aligned":
        return "score the model with OpenCompass or EvalScope; or try other prompts with PROMPTS=file.jsonl"
    return f"repeat it with CASE={directory / 'case.json'}, one request at a time, to see which request needs the batch"
