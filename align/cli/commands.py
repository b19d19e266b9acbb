"""Commands that run engines or compare what they left. Work is imported by the command that needs it, so that help
answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from align.cli.errors import guarded
from align.cli.flags import (
    Against,
    Allow,
    Budget,
    Capture,
    Debug,
    Device,
    DeviceMemory,
    EngineName,
    Floor,
    Fresh,
    Json,
    Ladder,
    Lang,
    LaunchTimeout,
    Layouts,
    Lean,
    MinCoverage,
    MinTp,
    NoAudit,
    NoFa,
    NoLadder,
    Only,
    Policy,
    Quiet,
    ReplayRouting,
    ResultJson,
    StepTimeout,
    Verbose,
    run_named,
)

_KNOWN = "What is known already (result.json and report.md keep it)"


def run_command(
    model: Annotated[
        str | None,
        typer.Option(
            help="Preset (qwen3, qwen3-moe, qwen2-moe, smollm2) or a local Hugging Face checkpoint. Default: qwen3."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines, each with text, messages or token_ids. Default: 1, 7, 33, 200 tokens."),
    ] = None,
    case: Annotated[
        Path | None,
        typer.Option(
            help="Run the case.json of an earlier run again; replaces the options that make a case.",
            callback=run_named,
        ),
    ] = None,
    only: Only = None,
    device: Device = "simnpu",
    dtype: Annotated[str | None, typer.Option(help="bfloat16 (bf16) or float16 (fp16). Default: bfloat16.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size.")] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel size.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel size: 1, or tp × dp.")] = None,
    ladder: Ladder = False,
    no_ladder: NoLadder = False,
    layouts: Layouts = None,
    min_tp: MinTp = None,
    device_memory: DeviceMemory = None,
    against: Against = "",
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens to generate per request. Default: 16.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in one KV-cache block. Default: 128.")] = None,
    numerics: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIDE=NAME",
            help="Numerics of the simulated NPU per side: candidate=native, reference=fp32-internal (default).",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SIDE.NAME=VALUE",
            help="One side's engine option; sampling.NAME and env.NAME set those: candidate.sampling.top_k=5.",
        ),
    ] = None,
    patch: Annotated[
        list[str] | None,
        typer.Option(metavar="SIDE=FILE", help="Python file with apply(ctx), run in every worker of that side."),
    ] = None,
    allow: Allow = None,
    policy: Policy = "derived",
    floor: Floor = "auto",
    min_coverage: MinCoverage = 100.0,
    no_tensors: Annotated[
        bool, typer.Option("--no-tensors", help="Compare the tokens alone; no tensors are recorded.")
    ] = False,
    capture: Capture = None,
    values_budget: Budget = None,
    lean: Lean = False,
    no_audit: NoAudit = False,
    no_fa: NoFa = False,
    fresh: Fresh = False,
    replay_routing: ReplayRouting = "auto",
    replay: Annotated[
        str,
        typer.Option(help="With --no-tensors: teacher-forced replay auto (when tokens differ), always or never."),
    ] = "auto",
    confirm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIDE:CHECKPOINT",
            help="Transplant there too: does the other side's tensor repair it? As in candidate:layers.1.mlp.up.",
        ),
    ] = None,
    no_confirm: Annotated[
        bool, typer.Option("--no-confirm", help="Do not confirm the first finding by a transplant.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="New directory for the results. Default: one below the cache's runs/.")
    ] = None,
    launch_timeout: LaunchTimeout = 600.0,
    step_timeout: StepTimeout = 180.0,
    symptom: Annotated[
        str | None, typer.Option(metavar="TEXT", rich_help_panel=_KNOWN, help="What is wrong, in your words.")
    ] = None,
    onset: Annotated[
        str | None,
        typer.Option(rich_help_panel=_KNOWN, help="Wrong from the first token, or a later one: first, later."),
    ] = None,
    batching: Annotated[
        str | None,
        typer.Option(rich_help_panel=_KNOWN, help="Shown by a single request, or only by several: single, multi."),
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(metavar="TEXT", rich_help_panel=_KNOWN, help="Optimisation stage: what was changed last."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="TEXT", rich_help_panel=_KNOWN, help="What the output should equal.")
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", rich_help_panel=_KNOWN, help="Ask for what was not given, on the terminal.")
    ] = False,
    lang: Lang = "en",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be recorded and what it takes.")] = False,
    json: ResultJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Run both engines and compare conditions, tokens and tensors.

    Both engines get the same token ids; each must repeat itself; then both are forced along the reference's tokens
    while every checkpoint of every layer is recorded and compared, from layer 0 upward. The run directory keeps the
    case, the conditions, the tokens, the traces and the engines' logs.

    Examples: `align run --model smollm2 --dtype fp16` ·
    `align run --patch candidate=fix.py` (try a fix without touching the installation) ·
    `align run --set candidate.enable_prefix_caching=true --allow prefix_caching` ·
    `align run --json > result.json` (`align schema` prints its format)
    """
    from align.cli import run

    settings = run.RunSettings(
        model=model,
        prompts=prompts,
        case_file=case,
        only=tuple(only or ()),
        device=device,
        dtype=dtype,
        layout=(tp, dp, ep),
        dry=dry_run,
        ladder="always" if ladder or layouts else "never" if no_ladder else "auto",
        layouts=tuple(layouts or ()),
        min_tp=min_tp,
        device_memory=device_memory,
        against=against,
        max_new_tokens=max_new_tokens,
        block_size=block_size,
        numerics=tuple(numerics or ()),
        sets=tuple(set_ or ()),
        patches=tuple(patch or ()),
        allow=tuple(allow or ()),
        policy=policy,
        floor=floor,
        min_coverage=min_coverage,
        tensors=not no_tensors,
        capture=tuple(capture or ()),
        values_budget=values_budget,
        lean=lean,
        audit=not (no_audit or lean),
        fa=not no_fa,
        fresh=fresh,
        routing=replay_routing,
        replay=replay,
        out=out,
        launch_timeout=launch_timeout,
        step_timeout=step_timeout,
        quiet=quiet,
        verbose=verbose,
        symptom=symptom,
        onset=onset,
        batching=batching,
        stage=stage,
        baseline=baseline,
        interactive=interactive,
        lang=lang,
        json=json,
        confirm=not no_confirm,
        accuse=tuple(confirm or ()),
    )
    raise typer.Exit(guarded(lambda: run.execute(settings), debug))


def capture_command(
    engine: EngineName,
    case: Annotated[
        Path, typer.Option(help="case.json: what is run. Every run directory has one.", callback=run_named)
    ],
    out: Annotated[Path, typer.Option(help="New directory for the trace.")],
    side: Annotated[
        str | None, typer.Option(help="candidate or reference. Default: the one that ENGINE is in the case.")
    ] = None,
    along: Annotated[
        Path | None,
        typer.Option(help="Follow the tokens of this trace instead of the engine's own.", callback=run_named),
    ] = None,
    only: Only = None,
    device: Device = "simnpu",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Engine option, as in align run.")
    ] = None,
    patch: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Python file with apply(ctx), run in every worker.")
    ] = None,
    capture: Capture = None,
    values_budget: Budget = None,
    lean: Lean = False,
    no_audit: NoAudit = False,
    no_fa: NoFa = False,
    launch_timeout: LaunchTimeout = 600.0,
    step_timeout: StepTimeout = 180.0,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Record one engine alone: for two images, or two machines.

    No cluster is needed. The engine must repeat its own greedy tokens; then it is forced along them, or along those of
    another trace, while its workers record. Two traces that follow the same tokens are compared with `align compare`.

    Examples: `align capture vllm --case RUN/case.json --out REF` ·
    `align capture lmdeploy --case RUN/case.json --out CAND --along REF` · `align compare CAND REF`
    """
    from align.cli import capture as work

    settings = work.CaptureSettings(
        engine=engine,
        case_file=case,
        out=out,
        side=side,
        along=along,
        only=tuple(only or ()),
        device=device,
        sets=tuple(set_ or ()),
        patches=tuple(patch or ()),
        capture=tuple(capture or ()),
        values_budget=values_budget,
        lean=lean,
        audit=not (no_audit or lean),
        fa=not no_fa,
        launch_timeout=launch_timeout,
        step_timeout=step_timeout,
        quiet=quiet,
        json=json,
    )
    raise typer.Exit(guarded(lambda: work.execute(settings), debug, json))


def compare_command(
    candidate: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            help="Trace, side directory of a run, .pt directory, or a whole run, also by its name.",
            callback=run_named,
        ),
    ],
    reference: Annotated[
        Path | None,
        typer.Argument(metavar="B", help="The same of the other side; not after a whole run.", callback=run_named),
    ] = None,
    policy: Policy = "derived",
    floor: Floor = "auto",
    min_coverage: MinCoverage = 100.0,
    allow: Allow = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result here, as JSON with all details.")
    ] = None,
    json: ResultJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Compare two recordings: A is the candidate, B the reference.

    Traces say the same as the run that made them: conditions, tokens, tensors, findings and exit code. Directories of
    `.pt` files (`{layer}_{op}_{input|output}_rank{rank}.pt`) are compared by name, without tokens and conditions.

    Examples: `align compare RUN` · `align compare CAND REF --out found.json` ·
    `align compare dlinfer_dump vllm_dump --policy seed`
    """
    from align.cli import compare as work

    settings = work.CompareSettings(
        candidate=candidate,
        reference=reference,
        policy=policy,
        floor=floor,
        min_coverage=min_coverage,
        allow=tuple(allow or ()),
        out=out,
        json=json,
        quiet=quiet,
        verbose=verbose,
    )
    raise typer.Exit(guarded(lambda: work.execute(settings), debug))
