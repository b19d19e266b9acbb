"""The rules of layouts as a table: what the help and README show. :class:`align.layout.Layout` and its check against a
model refuse what breaks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import fill

from align.layout.flags import engine_flags
from align.layout.groups import Dimension
from align.layout.triple import Layout


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        rule: in words; the message of a refusal begins alike.
        of: whose it is: every layout, the model, or an engine.
        source: what says so.
        dimension: of which an engine's rule is, if it is of one.
    """

    rule: str
    of: str
    source: str
    dimension: Dimension | None = None


RULES: tuple[Rule, ...] = (
    Rule("tp, dp and ep are positive; the world has tp × dp ranks", "layout", "design §7"),
    Rule("ep must be 1 or tp*dp", "layout", "design §7"),
    Rule("tp must divide num_attention_heads", "model", "both engines split whole heads"),
    Rule("tp must divide num_key_value_heads or be a multiple of it", "model", "key heads are split or repeated"),
    Rule("tp must divide intermediate_size", "model", "columns of the gate and up projections"),
    Rule("ep must be 1 for a model without experts", "model", "design §7"),
    Rule("ep must divide the number of experts", "model", "each rank holds as many"),
    Rule("--tp counts all devices while ep is 1 (tp × dp), and one group's with ep", "lmdeploy", "seed 003, path C"),
    Rule("dp is dropped silently where --tp and --ep are 1", "lmdeploy", "read back as the condition dp"),
    Rule("dp needs Ray, with a process for each group", "lmdeploy", "its executor"),
    Rule(
        "ep needs an A3 below 16 ranks, which the simulated device then is",
        "lmdeploy",
        "dlinfer 0.2.7, fused_moe: on an A2 local weights are indexed by global ids",
        "ep",
    ),
    Rule("--enable-expert-parallel spreads the experts over all ranks: ep is tp × dp", "vllm", "its parallel config"),
)

#: Columns of a line in a help text.
_WIDTH = 76
#: What the table of spellings shows.
_SHOWN = (Layout(), Layout(2), Layout(2, 2), Layout(2, 2, 4))


def expert_rules(engine: str, layout: Layout) -> tuple[str, ...]:
    """What an engine demands of a layout that spreads experts; empty for other layouts."""
    return tuple(one.rule for one in RULES if one.of == engine and one.dimension == "ep" and layout.ep > 1)


def rules_table() -> str:
    """The rules as a table of Markdown."""
    rows = [f"| {one.of} | {one.rule} |" for one in RULES]
    return "\n".join(["| of | rule |", "|---|---|", *rows])


def flags_table() -> str:
    """Each engine's own flags for some layouts, as a table of Markdown."""
    rows = [
        f"| {layout} | {' '.join(engine_flags(layout, 'lmdeploy'))} | {' '.join(engine_flags(layout, 'vllm'))} |"
        for layout in _SHOWN
    ]
    return "\n".join(["| layout | lmdeploy | vllm |", "|---|---|---|", *rows])


def help_text() -> str:
    """Both for the help of a command, as lists whose lines fit a narrow terminal."""
    flags = [
        f"{layout} is {engine}'s {' '.join(engine_flags(layout, engine))}"
        for layout in _SHOWN[1:]
        for engine in ("lmdeploy", "vllm")
    ]
    rules = [one.rule if one.of in ("layout", "model") else f"{one.of}: {one.rule}" for one in RULES]
    return f"Layouts in each engine's own flags:\n\n{_listed(flags)}\n\nRules of layouts:\n\n{_listed(rules)}"


def _listed(lines: list[str]) -> str:
    r"""A list of Markdown; ``\b`` keeps its lines where no Markdown is read."""
    broken = [fill(f"- {line}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in lines]
    return "\b\n" + "\n".join(broken)
