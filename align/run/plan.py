"""What is asked of the engines, decided before anything is started."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adapters.base import SIDES, EngineSpec, Generation, Request, TokenStep
from adapters.host import ADAPTERS
from adapters.probe.launch import SIMULATED as SIMULATED
from align.case.capacity import capacity
from align.case.schema import Case, Numerics
from align.errors import UserError
from align.models.info import ModelInfo
from align.models.shapes import SIMULATED_ARCHITECTURES, architecture, check_shapes

#: Smallest block that an engine takes, in tokens: powers of two from here on.
MIN_BLOCK = {"lmdeploy": 16, "vllm": 128}
#: Largest block that an engine takes, if it has a bound. vllm-ascend's attention has kernels for 128 alone
#: (``get_supported_kernel_block_sizes``): larger blocks are split in its block table (``BlockTable``), but a cache of
#: dense models is not (``use_hybrid_blocks`` in ``model_runner_v1``), so that attention reads blocks of others.
MAX_BLOCK = {"vllm": 128}


def check_launchable(case: Case) -> None:
    """Refuse what no adapter launches yet, before anything is started.

    Raises:
        UserError: an engine that is no side.
    """
    for role, engine in zip(SIDES, (case.candidate, case.reference), strict=True):
        if engine not in ADAPTERS:
            raise UserError(
                f"the case's {role} is {engine}, which is not launched as a side",
                f"name one of {', '.join(ADAPTERS)} as {role} in the case file",
            )
    block = case.batch.block_size
    engines = (case.candidate, case.reference)
    smallest = max(MIN_BLOCK[engine] for engine in engines)
    largest = min((MAX_BLOCK[engine] for engine in engines if engine in MAX_BLOCK), default=None)
    if block < smallest or block & (block - 1) or (largest is not None and block > largest):
        accepted = f"a power of two from {smallest} on, such as {max(128, smallest)}"
        raise UserError(
            f"block_size {block} is not one that both engines take",
            f"use {f'{smallest}, the only one' if smallest == largest else accepted}",
        )


def check_device(case: Case, info: ModelInfo, device: str) -> None:
    """Refuse what the device cannot run, before anything is started.

    Raises:
        UserError: a model whose operators are not simulated, or numerics asked of hardware.
    """
    if device != SIMULATED:
        if case.numerics != Numerics():
            raise UserError(
                f"the case asks for numerics of the simulated NPU, and the device is {device}",
                "leave --numerics out, or remove numerics from the case file",
            )
        return
    if architecture(info) not in SIMULATED_ARCHITECTURES:
        known = ", ".join(SIMULATED_ARCHITECTURES)
        raise UserError(
            f"{info.name} is a {architecture(info)}; the operators of {known} are simulated",
            "choose one of those, or a device that has the others: DEVICE=ascend",
        )
    quantised = info.config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise UserError(
            f"{info.name} is quantised ({method}), and quantised operators are not simulated",
            "choose the model in bfloat16 or float16, or DEVICE=ascend",
        )
    check_shapes(info)


@dataclass(frozen=True)
class SideExtras:
    """What one side alone is asked for.

    Attributes:
        options: extra engine options by name (``--set``): plain ones, ``sampling.NAME`` and ``env.NAME``.
        patches: Python files that run in every worker (``--patch``), absolute.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    patches: tuple[str, ...] = ()


def engine_spec(
    case: Case,
    info: ModelInfo,
    *,
    engine: str,
    role: str,
    device: str,
    work_dir: Path,
    extras: SideExtras = SideExtras(),
    audit: bool = True,
    fa: bool = True,
) -> EngineSpec:
    """What one engine is asked for. Both engines get the same numbers, apart from ``extras``.

    Room is made for exactly this case, so that neither engine splits a prefill, preempts, or has memory to reuse that
    the other does not have.
    """
    need = capacity(case)
    block = case.batch.block_size
    return EngineSpec(
        engine=engine,
        side=role,
        model_path=str(info.path),
        dtype=case.dtype,
        work_dir=str(work_dir),
        tp=case.layout.tp,
        dp=case.layout.dp,
        ep=case.layout.ep,
        block_size=block,
        max_model_len=-(-need.max_model_len // block) * block,
        max_batch=need.max_batch,
        # One token more than the prompts: lmdeploy splits a prefill that reaches its limit.
        max_prefill_tokens=-(-(need.max_prefill_tokens + 1) // block) * block,
        num_blocks=need.num_blocks,
        hold_arrivals=case.batch.together,
        device=device,
        options=dict(extras.options),
        patches=extras.patches,
        audit=audit,
        fa=fa,
    )


def own_changes(spec: EngineSpec) -> list[str]:
    """What this side alone was asked for, as the options of a command with two sides."""
    sets = [f"--set {spec.side}.{name}={_as_typed(value)}" for name, value in spec.options.items()]
    return [*sets, *(f"--patch {spec.side}={file}" for file in spec.patches)]


def without_side(text: str, role: str) -> str:
    """The same text for a command with one side, whose options do not name it."""
    return text.replace(f"--set {role}.", "--set ").replace(f"--patch {role}=", "--patch ")


def _as_typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def generations_along(ids: Mapping[str, Iterable[int]]) -> tuple[Generation, ...]:
    """Ids by request as if they had been generated."""
    return tuple(
        Generation(request, tuple(TokenStep(chosen=token, greedy=token, top=()) for token in tokens))
        for request, tokens in ids.items()
    )


def forced_along(requests: tuple[Request, ...], generations: Iterable[Generation]) -> tuple[Request, ...]:
    """The same requests, teacher-forced along what was generated.

    Raises:
        ValueError: a request was not generated; names it.
    """
    ids = {generation.request: generation.token_ids for generation in generations}
    missing = [request.name for request in requests if not ids.get(request.name)]
    if missing:
        raise ValueError(f"no tokens to follow for request {', '.join(missing)}")
    return tuple(
        replace(request, forced=ids[request.name], max_new_tokens=len(ids[request.name]), stop_ids=())
        for request in requests
    )
