"""Commands about the truth and about noise: their options. Work is imported by the command that needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from align.cli.errors import guarded
from align.cli.flags import Budget, Debug, Device, Json, LaunchTimeout, Quiet, StepTimeout, Verbose, run_named


def golden_command(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="Directory or name of a run with recordings of both sides.", callback=run_named
        ),
    ],
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Say which side is nearer to the truth: compare both with transformers in float32.

    The checkpoint runs once more in the driver, in float32 with eager attention, along the tokens that both sides
    followed; its trace is kept in RUN/golden. Whose error is larger, whole or in a channel, is said for each
    checkpoint; values that a side did not keep are not observable. Exit code 1: a side is further than the other, or
    than rounding explains.

    Examples: `align golden RUN` · `align golden RUN --json > golden.json`
    """
    from align.cli import golden as work

    raise typer.Exit(guarded(lambda: work.execute(work.GoldenSettings(run, json, quiet, verbose)), debug, json))


def calibrate_command(
    model: Annotated[str, typer.Option(help="Preset, as of align run, or a local Hugging Face checkpoint.")] = "qwen3",
    dtype: Annotated[str, typer.Option(help="bfloat16 (bf16) or float16 (fp16).")] = "bfloat16",
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 1,
    runs: Annotated[
        int,
        typer.Option(help="Clean runs: as it is, numerics swapped, other order, other block size, other prompts"),
    ] = 4,
    device: Device = "simnpu",
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens to generate per request. Default: 16.")] = None,
    no_golden: Annotated[
        bool, typer.Option("--no-golden", help="Leave transformers in float32 out. It is left out if it does not fit.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Of the floor. Default: model, dtype, layout and device.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The floor file. Default: NAME.json in the cache's floors/.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the runs; what is there is used again.")
    ] = None,
    values_budget: Budget = None,
    launch_timeout: LaunchTimeout = 600.0,
    step_timeout: StepTimeout = 180.0,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure how far right engines are apart, and keep it as the floor that tensors are judged by.

    Runs both engines in ways that legitimately differ, compares all recordings with each other and with transformers in
    float32, and keeps the distributions by kind of checkpoint. A run that is not aligned makes no floor. An interrupted
    calibration goes on where it stopped when the command is given again.

    Examples: `align calibrate --model smollm2 --dtype fp16` · `align run --floor NAME` ·
    `align compare RUN/candidate RUN/reference --floor none`
    """
    from align.cli import calibrate

    settings = calibrate.CalibrateSettings(
        model=model,
        dtype=dtype,
        tp=tp,
        runs=runs,
        device=device,
        max_new_tokens=max_new_tokens,
        golden=not no_golden,
        name=name,
        out=out,
        work=work,
        values_budget=values_budget,
        launch_timeout=launch_timeout,
        step_timeout=step_timeout,
        json=json,
        quiet=quiet,
    )
    raise typer.Exit(guarded(lambda: calibrate.execute(settings), debug, json))
