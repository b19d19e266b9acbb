"""``align fa check``: what the rules say of described calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from align.cli.fa_file import load
from align.cli.output import print_json
from align.errors import EXIT_ALIGNED, EXIT_DIVERGED, UserError
from align.fa import Report, check_call
from align.fa.outcome import LANGUAGES, SEVERITIES

_STYLES = {"ERROR": "bold red", "WARN": "yellow", "REMIND": "magenta", "INFO": "dim", "OK": "green"}
_WORDS = {
    "en": {"call": "call", "layer": "layer", "held": "rules hold", "open": "not observable", "needs": "needs",
           "no verdict": "the arguments alone: whether the numbers are right is said by a comparison (align run)"},
    "zh": {"call": "调用", "layer": "层", "held": "条规则通过", "open": "不可观测", "needs": "需要",
           "no verdict": "仅为入参检查：精度结论需与基线做数值对比（align run）"},
}  # fmt: skip


def execute(files: Sequence[Path], language: str, json: bool) -> int:
    """Check every call of the files, print what is found, and return 1 if there is an ERROR.

    Raises:
        UserError: a file that holds no call, an operator that is not known, or no such language.
    """
    if language not in LANGUAGES:
        raise UserError(f"no language {language!r}", f"use one of: {', '.join(LANGUAGES)}")
    reports = [check_call(call) for path in files for call in load(path)]
    code = EXIT_ALIGNED if all(one.ok for one in reports) else EXIT_DIVERGED
    if json:
        counts = {name: sum(len(one.of(name)) for one in reports) for name in SEVERITIES}
        print_json({"exit": code, "counts": counts, "calls": [one.record() for one in reports]})
        return code
    console = Console(emoji=False, highlight=False)
    for place, report in enumerate(reports):
        _show(console, place, report, language)
    console.print(Text(_WORDS[language]["no verdict"], "dim"), soft_wrap=True)
    return code


def _show(console: Console, place: int, report: Report, language: str) -> None:
    words, context = _WORDS[language], report.call.context
    known = [context.phase, "" if context.layer is None else f"{words['layer']} {context.layer}", context.path]
    head = ", ".join([report.call.operator, *(one for one in known if one)])
    console.print(Text(f"{words['call']} {place}: {head}", "bold"), soft_wrap=True)
    for one in report.findings:
        line = Text.assemble((f"[{one.severity}]", _STYLES[one.severity]), f" {one.said[language]} ({one.rule})")
        console.print(line, soft_wrap=True)
    for what in dict.fromkeys(report.unknown.values()):
        lost = [name for name, needed in report.unknown.items() if needed == what]
        console.print(Text(f"{words['open']}: {', '.join(lost)} ({words['needs']}: {what})", "magenta"), soft_wrap=True)
    counts = ", ".join(f"{len(report.of(name))} {name}" for name in SEVERITIES[:2])
    console.print(Text(f"{counts}; {len(report.held)} {words['held']}; {len(report.unknown)} {words['open']}"))
