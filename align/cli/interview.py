"""``--interactive``: what seeds 003 and 000 ask first, asked on the terminal. Nothing is asked that was given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from align.errors import UserError
from align.result.facts import BATCHINGS, ONSETS, Answers

#: Asks one question; answers the text, or what was offered.
Ask = Callable[[str, str], str]
UNKNOWN = ""


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        name: of the option that answers it too.
        text: what is asked.
        choices: what it may be; empty for free text.
        default: what Enter means.
    """

    name: str
    text: str
    choices: tuple[str, ...] = ()
    default: str = UNKNOWN


#: Asked unless a case or the option says it (seed 003 step 1: model, hardware, parallel configuration).
CASE_QUESTIONS = (
    Question("model", "Model: preset (qwen3, qwen3-moe, qwen2-moe, smollm2) or checkpoint directory", default="qwen3"),
    Question("dtype", "Dtype", ("bfloat16", "float16"), "bfloat16"),
    Question("tp", "Tensor-parallel size", default="1"),
)
#: Seed 003 step 1 and seed 000 step 1. Enter leaves them unknown, and the run may find out.
QUESTIONS = (
    Question("symptom", "Symptom in your words"),
    Question("onset", "Wrong from the first token, or from a later one", tuple(ONSETS)),
    Question("batching", "Shown by a single request, or only by several (multi)", tuple(BATCHINGS)),
    Question("stage", "Optimisation stage: what was changed last"),
    Question("baseline", "Baseline: what the output should equal"),
)


def answers_of(given: Mapping[str, Any], model: bool, layout: bool) -> Answers:
    """The options as answers.

    Raises:
        UserError: ``--onset`` or ``--batching`` is none of its choices.
    """
    for question in QUESTIONS:
        value = given.get(question.name)
        if question.choices and value and value not in question.choices:
            raise UserError(
                f"--{question.name} {value} is not known",
                f"choose one of {', '.join(question.choices)}, or leave it out",
            )
    texts = {question.name: str(given.get(question.name) or "").strip() for question in QUESTIONS}
    return Answers(**texts, model=model, layout=layout)


def interview(given: Mapping[str, Any], case_is_given: bool, ask: Ask, terminal: bool) -> dict[str, str]:
    """Answers to what was not given, by name; without what stays unknown.

    Args:
        given: by name; ``None`` and empty mean not given.
        case_is_given: a case file decides model, dtype and layout.
        terminal: whether somebody is there to answer.

    Raises:
        UserError: nobody is.
    """
    if not terminal:
        raise UserError(
            "--interactive asks on a terminal, and there is none",
            "answer with options: --symptom TEXT --onset first|later --batching single|multi --stage TEXT "
            "--baseline TEXT",
        )
    questions = QUESTIONS if case_is_given else (*CASE_QUESTIONS, *QUESTIONS)
    found = {}
    for question in questions:
        if given.get(question.name):
            continue
        answer = _one(question, ask)
        if answer != UNKNOWN:
            found[question.name] = answer
    return found


def _one(question: Question, ask: Ask) -> str:
    offered: Collection[str] = question.choices
    text = question.text + (f" ({'|'.join(offered)})" if offered else "")
    while True:
        answer = ask(text, question.default).strip()
        if answer == question.default or not offered or answer in offered:
            return answer
        text = f"{answer} is none of {', '.join(offered)}. {question.text}"


def ask_on_terminal(text: str, default: str) -> str:
    """On standard error, so that standard output stays the result's."""
    import typer

    shown = text if default else f"{text} [Enter: unknown]"
    return str(typer.prompt(shown, default=default, show_default=bool(default), err=True))


def is_terminal() -> bool:
    """Whether a person is at both ends."""
    return sys.stdin.isatty() and sys.stderr.isatty()
