"""The command as a whole: help, wrong usage, and the exit code."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from typer.core import TyperGroup, TyperOption
from typer.exceptions import TyperException

from align.cli import again, commands, drill_command, earlier, fa, floors, history, isolate, machine, reading
from align.cli.errors import EXIT_INTERRUPTED, guarded, say_error, say_stopped
from align.cli.output import asked_in, print_error
from align.errors import EXIT_NOT_COMPARABLE, UserError
from align.layout.rules import help_text

#: Also where Python was given the package to run.
NAME = "align"


class _Group(TyperGroup):
    """The commands together."""

    def get_help_option(self, ctx: Any) -> TyperOption | None:
        """With a default that needs no conversion: conversions import pydantic, a third of the time of a help text."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


def with_layouts(command: Callable[..., None]) -> str:
    """What a command says of itself, and the tables of layouts; ``\\b`` keeps the lines of a table."""
    return f"{inspect.cleandoc(command.__doc__ or '')}\n\n{help_text()}"


app = typer.Typer(
    name=NAME,
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Runs one model on two inference engines in controlled conditions and says where they part.",
    epilog=(
        "Examples: `align run --model qwen3` · `align run --model /models/Qwen3-0.6B --prompts prompts.jsonl` · "
        "`align run --case RUN/case.json` · `align compare RUN/candidate RUN/reference`. "
        "Exit codes: 0 aligned, 1 diverged, 2 could not compare."
    ),
)


@app.callback()
def align_command(
    version: Annotated[
        bool, typer.Option("--version", help="Versions of align and of the engines that it pins, and exit.")
    ] = False,
) -> None:
    """The command itself; what it does without a command is said by :func:`main`."""


app.command("run", help=with_layouts(commands.run_command))(commands.run_command)
app.command("isolate", help=with_layouts(isolate.isolate_command))(isolate.isolate_command)
app.command("runs")(earlier.runs_command)
app.command("resume")(again.resume_command)
app.command("replay")(again.replay_command)
app.command("capture")(commands.capture_command)
app.command("compare")(commands.compare_command)
app.command("next")(again.next_command)
app.command("reduce")(again.reduce_command)
app.command("export")(reading.export_command)
app.command("report")(reading.report_command)
app.command("open")(reading.open_command)
app.command("checklist")(reading.checklist_command)
app.command("schema")(reading.schema_command)
app.command("taps")(reading.taps_command)
app.command("explain")(reading.explain_command)
app.command("doctor")(machine.doctor_command)
app.add_typer(machine.env_app, name="env", cls=_Group)
app.add_typer(fa.fa_app, name="fa", cls=_Group)
app.command("golden")(floors.golden_command)
app.command("calibrate")(floors.calibrate_command)
app.command("drill")(drill_command.drill_command)
app.command("diff")(history.diff_command)
app.command("nightly")(history.nightly_command)


def main() -> None:
    """Entry point of the command."""
    # Boxes and styles are for people at a terminal; plain text is for everything else, and half as long in coming.
    app.rich_markup_mode = "markdown" if sys.stdout.isatty() else None
    if sys.argv[1:2] == ["--version"]:  # whatever follows, as other commands do
        from align.cli import version

        sys.exit(guarded(lambda: version.execute(asked_in(sys.argv)), False))
    try:
        code = app(standalone_mode=False, prog_name=NAME)
    except TyperException as error:  # a wrong option; without any argument the help instead
        if not sys.argv[1:]:
            sys.stdout.write(f"{error.format_message()}\n")
            sys.exit(EXIT_NOT_COMPARABLE)
        context = getattr(error, "ctx", None)
        failure = _refusal(error, context)
        say_error(failure)
        if asked_in(sys.argv):
            print_error(failure, EXIT_NOT_COMPARABLE)
        sys.exit(EXIT_NOT_COMPARABLE)
    if code == EXIT_INTERRUPTED:  # before or after the work itself
        say_stopped()
    sys.exit(code)


#: What the parser says of a text that is no number, and what is wanted instead.
_NUMBERS = {"Input should be a valid integer": "a whole number", "Input should be a valid number": "a number"}
#: Options of `align run` that `make align` takes as variables of another name than theirs.
_VARIABLES = {"--max-new-tokens": "MAX_NEW", "--tp": "TP", "--dp": "DP", "--ep": "EP"}


def _no_number(error: TyperException) -> str | None:
    """What is wrong with an option that takes a number; ``None`` if something else is."""
    wanted = next((words for said, words in _NUMBERS.items() if said in error.format_message()), None)
    options = getattr(getattr(error, "param", None), "opts", ())
    if wanted is None or not options:
        return None
    option = max(options, key=len)
    variable = _VARIABLES.get(option) if os.environ.get("MAKELEVEL") else None
    given = _given(option)
    what = f"it takes {wanted}" if given is None else f"{given!r} is not {wanted}"
    return f"Invalid value for {option!r}{f' ({variable} of make)' if variable else ''}: {what}"


def _given(option: str) -> str | None:
    """What was typed for an option; ``None`` if it is not found."""
    for word, following in zip(sys.argv, (*sys.argv[1:], None), strict=True):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def _refusal(error: TyperException, context: Any) -> UserError:
    """What is wrong with a command line, and the option that was meant, if one looks like it."""
    see = f"see what there is: {NAME if context is None else context.command_path} --help"
    number = _no_number(error)
    if number is not None:
        return UserError(number, see)
    wrong = getattr(error, "option_name", None)
    if context is None or wrong is None or not hasattr(error, "possibilities"):
        return UserError(error.format_message(), see)
    known = [name for option in context.command.get_params(context) for name in option.opts if name.startswith("--")]
    meant = get_close_matches(wrong.lstrip("-"), [name.removeprefix("--") for name in known], n=1)
    return UserError(error.message, f"did you mean --{meant[0]}? {see}" if meant else see)
