"""The command as a whole: help, wrong usage, and the exit code."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup, TyperOption
from typer.exceptions import TyperException

from align.cli import again, commands, floors, machine
from align.cli.errors import EXIT_INTERRUPTED, say_error, say_stopped
from align.cli.output import asked_in, print_error
from align.errors import EXIT_NOT_COMPARABLE, UserError

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
app.command("run")(commands.run_command)
app.command("resume")(again.resume_command)
app.command("replay")(again.replay_command)
app.command("capture")(commands.capture_command)
app.command("compare")(commands.compare_command)
app.command("next")(again.next_command)
app.command("export")(commands.export_command)
app.command("report")(commands.report_command)
app.command("schema")(commands.schema_command)
app.command("taps")(commands.taps_command)
app.command("explain")(commands.explain_command)
app.command("doctor")(machine.doctor_command)
app.add_typer(machine.env_app, name="env", cls=_Group)
app.command("golden")(floors.golden_command)
app.command("calibrate")(floors.calibrate_command)


def main() -> None:
    """Entry point of the command."""
    # Boxes and styles are for people at a terminal; plain text is for everything else, and half as long in coming.
    app.rich_markup_mode = "markdown" if sys.stdout.isatty() else None
    try:
        code = app(standalone_mode=False, prog_name=NAME)
    except TyperException as error:  # a wrong option; without any argument the help instead
        if not sys.argv[1:]:
            sys.stdout.write(f"{error.format_message()}\n")
            sys.exit(EXIT_NOT_COMPARABLE)
        context = getattr(error, "ctx", None)
        command = NAME if context is None else context.command_path
        failure = UserError(error.format_message(), f"see what there is: {command} --help")
        say_error(failure)
        if asked_in(sys.argv):
            print_error(failure, EXIT_NOT_COMPARABLE)
        sys.exit(EXIT_NOT_COMPARABLE)
    if code == EXIT_INTERRUPTED:  # before or after the work itself
        say_stopped()
    sys.exit(code)
