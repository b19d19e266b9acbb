"""The tensors of both sides: coverage, the first divergent checkpoint, the worst of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from rich.console import Console
from rich.table import Table
from rich.text import Text

from align.compare.coverage import Coverage, percent_text
from align.compare.tensors import CheckpointComparison, TensorComparison
from align.findings import Finding
from align.sentences import counted

_SHOWN_LAYERS = 12
_SHOWN_MISSING = 4
_SHOWN_ACCUSED = 2
_STYLES = {"equal": "green", "within": "green", "beyond": "red"}
_TWO_TESTS = (
    "These are two tests: the table compares the sides, where rounding adds up from layer to layer (wide bounds); an "
    "operator is accused by its own error, recomputed from the inputs that its own side recorded (narrow bounds), and "
    "weights when they differ from the checkpoint's files."
)
_INPUTS = {
    "equal": "its inputs are equal",
    "within": "its inputs agree within rounding",
    "beyond": "its inputs differ already",
    "unknown": "its inputs were not compared",
}


def show_tensors(
    console: Console,
    tensors: TensorComparison,
    findings: Sequence[Finding] = (),
    verbose: bool = False,
    surplus: Mapping[str, int] | None = None,
) -> None:
    """Coverage and rows, then what is beyond, then a line per layer.

    Args:
        surplus: rows by side that were computed ahead of what was asked for.
    """
    _show_coverage(console, tensors)
    console.print(_rows_words(tensors, surplus or {}), highlight=False, markup=False, soft_wrap=True)
    first = first_beyond(tensors)
    if first is not None:
        console.print(
            f"first divergent checkpoint: {first.name} ({_INPUTS[first.inputs_state]}): {first.why}",
            highlight=False,
            markup=False,
        )
    headline = _headline(tensors, findings) or first
    if headline is not None and headline.metrics is not None:
        console.print(f"{headline.name}: {seed_numbers(headline)}", highlight=False, markup=False)
    accused = _accused(tensors, findings)
    _show_layers(console, tensors, verbose, accused)
    hidden = [f"{one.name} ({one.verdict})" for one in accused if one.verdict in ("equal", "within")]
    if hidden:
        words = f"accused: {', '.join(hidden)}. {_TWO_TESTS}"
        console.print(words, highlight=False, markup=False, soft_wrap=True)
    if tensors.policy.floor is not None and tensors.policy.name == "derived":
        words = f"between the sides the {tensors.policy.floor.words} judges, where it knows a checkpoint's kind"
        console.print(words, highlight=False, markup=False, soft_wrap=True)
    for note in tensors.notes:
        console.print(f"note: {note}", style="dim", highlight=False, markup=False)


def _rows_words(tensors: TensorComparison, surplus: Mapping[str, int]) -> str:
    """How many rows were compared, and how many have no partner, by reason."""
    pairing = tensors.pairing
    compared = len(pairing.rows) or max((one.rows for one in tensors.checkpoints), default=0)
    reasons = dict(pairing.unpaired)
    words = []
    for side in ("candidate", "reference"):
        other = "reference" if side == "candidate" else "candidate"
        alone = f"only on the {side}"
        # What both looked ahead at is paired; the rest of it has no partner and needs none.
        ahead = min(reasons.get(alone, 0), max(surplus.get(side, 0) - surplus.get(other, 0), 0))
        if ahead:
            words.append(f"{ahead} {alone} (computed ahead, behind the last token that was asked for)")
            reasons[alone] -= ahead
    words += [f"{count} {reason}" for reason, count in reasons.items() if count]
    return f"rows: {compared} compared" + (f"; without a partner: {', '.join(words)}" if words else "")


def first_beyond(tensors: TensorComparison) -> CheckpointComparison | None:
    """The earliest checkpoint, layer 0 first, that rounding does not explain."""
    return next((one for one in tensors.checkpoints if one.verdict == "beyond"), None)


def _headline(tensors: TensorComparison, findings: Sequence[Finding]) -> CheckpointComparison | None:
    named = next((finding.checkpoint for finding in findings if finding.checkpoint is not None), None)
    return None if named is None else tensors.get(named)


def seed_numbers(one: CheckpointComparison) -> str:
    """The numbers that the project's alignment guide (seed 003) asks for, and what its thresholds say."""
    metrics = one.metrics
    assert metrics is not None
    if metrics.equal:
        return "torch.equal"
    if metrics.rel_l2 is None:
        return f"{counted(metrics.rows_total, 'row')} differ and must be equal"
    passes = {True: "passes", False: "fails", None: "not known"}[one.seed]
    if metrics.max_abs is None and metrics.max_rel is None and metrics.cosine is None:
        return f"relative L2 {_number(metrics.rel_l2)}, estimated from digests of {counted(one.rows, 'row')}"
    numbers = ", ".join(
        f"{name} {_number(value)}"
        for name, value in (("max abs", metrics.max_abs), ("max rel", metrics.max_rel), ("cosine", metrics.cosine))
    )
    return f"{numbers} (the alignment guide's thresholds: {passes}); relative L2 {_number(metrics.rel_l2)}"


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"


def _show_coverage(console: Console, tensors: TensorComparison) -> None:
    words = ", ".join(
        f"{part} {percent_text(coverage.percent)} % of {coverage.expected}"
        for part, coverage in tensors.coverage.items()
    )
    console.print(f"coverage: {words} checkpoints", highlight=False)
    told: set[str] = set()
    for part, coverage in tensors.coverage.items():
        # What was not compared although both sides have it comes last.
        lacking = [name for name in coverage.lacking if part != "paired" or name not in told]
        told |= set(lacking)
        if lacking:
            what = "not compared" if part == "paired" else f"not observable on the {part}"
            text = f"{what}: {_named(coverage, lacking)}"
            console.print(text, style="yellow", highlight=False, markup=False)


def _named(coverage: Coverage, names: Sequence[str]) -> str:
    reasons = dict(coverage.why)
    shown = ", ".join(name + (f" ({reasons[name]})" if name in reasons else "") for name in names[:_SHOWN_MISSING])
    return shown + ("" if len(names) <= _SHOWN_MISSING else f" and {len(names) - _SHOWN_MISSING} more")


def _accused(tensors: TensorComparison, findings: Sequence[Finding]) -> list[CheckpointComparison]:
    """The checkpoints that findings name, each once."""
    names = dict.fromkeys(finding.checkpoint for finding in findings if finding.checkpoint is not None)
    return [one for name in names if (one := tensors.get(name)) is not None]


def _show_layers(
    console: Console, tensors: TensorComparison, verbose: bool, accused: Sequence[CheckpointComparison]
) -> None:
    groups: dict[str, list[CheckpointComparison]] = {}
    for one in tensors.checkpoints:
        groups.setdefault(f"layer {one.layer}" if one.layer is not None else one.name, []).append(one)
    rows = [(place, members, _worst(members)) for place, members in groups.items()]
    if not verbose and len(rows) > _SHOWN_LAYERS:
        # Both ends, and every place where something is beyond or accused.
        kept = {*range(4), *range(len(rows) - 4, len(rows))}
        kept |= {
            index
            for index, (_, members, _) in enumerate(rows)
            if any(one.verdict == "beyond" or one in accused for one in members)
        }
        chosen = sorted(kept)[: 2 * _SHOWN_LAYERS]
    else:
        chosen = list(range(len(rows)))
    table = Table(title="tensors, worst of each layer", title_justify="left", box=None, pad_edge=False)
    for column in ("where", "equal", "within", "beyond", "not compared", "worst", "relative L2", "verdict"):
        left = column in ("where", "worst", "verdict")
        # The verdict is never cut; where there is no room, what stands before it is folded.
        table.add_column(column, justify="left" if left else "right", no_wrap=column == "verdict", overflow="fold")
    shown = -1
    for index in chosen:
        place, members, worst = rows[index]
        _gap(table, index - shown - 1)
        shown = index
        counts = [sum(one.verdict == verdict for one in members) for verdict in ("equal", "within", "beyond")]
        rest = len(members) - sum(counts)
        verdict = "beyond" if counts[2] else "within" if counts[1] else "equal" if counts[0] else "not observable"
        table.add_row(
            Text(place),
            *(str(count or "-") for count in (*counts, rest)),
            Text("-" if worst is None else worst.kind or worst.name),
            "-" if worst is None or worst.metrics is None else _number(worst.metrics.rel_l2),
            _judged(verdict, members, accused),
        )
    _gap(table, len(rows) - shown - 1)
    console.print(table)
    if len(chosen) < len(rows):
        console.print("  --verbose shows every layer", highlight=False)
    estimated = [one for one in tensors.checkpoints if one.estimated and one.compared]
    if estimated:
        console.print(
            f"* estimated: {len(estimated)} of {counted(len(tensors.checkpoints), 'checkpoint')} were compared by "
            f"digests of {max(one.rows for one in estimated)} of {counted(len(tensors.pairing.rows), 'row')}",
            highlight=False,
            soft_wrap=True,
        )


def _gap(table: Table, count: int) -> None:
    """A row for what is left out, in its place."""
    if count:
        table.add_row(Text(f"… {count} more", style="dim"))


def _judged(verdict: str, members: Sequence[CheckpointComparison], accused: Sequence[CheckpointComparison]) -> Text:
    """A layer's verdict, and what findings name in it."""
    text = Text(verdict + _estimated(verdict, members), style=_STYLES.get(verdict, "yellow"))
    names = [one.kind or one.name for one in members if one in accused]
    if names:
        more = " …" if len(names) > _SHOWN_ACCUSED else ""
        text.append(f", accused: {', '.join(names[:_SHOWN_ACCUSED])}{more}", style="bold red")
    return text


def _estimated(verdict: str, members: Sequence[CheckpointComparison]) -> str:
    """A mark if a layer's verdict rests on digests, at some of its checkpoints at least."""
    return "*" if any(one.estimated for one in members if one.verdict == verdict) else ""


def _worst(members: Sequence[CheckpointComparison]) -> CheckpointComparison | None:
    """The member whose carried tensors are furthest apart."""
    measured = [one for one in members if one.metrics is not None and one.metrics.rel_l2]  # neither unknown nor zero

    def distance(one: CheckpointComparison) -> float:
        assert one.metrics is not None and one.metrics.rel_l2 is not None
        return one.metrics.rel_l2 if isfinite(one.metrics.rel_l2) else float("inf")

    return max(measured, key=distance, default=None)
