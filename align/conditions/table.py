"""The conditions, as data: what each is called, which facts say it, how it is judged, and what mends it.

:mod:`align.conditions.requested` says what is demanded, :mod:`align.conditions.judge` how a comparison is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from align.findings import Path

#: When the facts of a condition are there: once the engine is up, or after its first run.
Stage = Literal["launch", "run"]
LAUNCH: Stage = "launch"
RUN: Stage = "run"

PROCEDURE = "the procedure"
CASE = "the case"
CONFIG = "the checkpoint's config.json"

_STEP_2 = "seed 003 step 2"
_CONFIG_SOURCE = "issue 3 part 1: configuration as each engine read it"
_OPTION = "remove the option of that side that changes it"


@dataclass(frozen=True)
class Row:
    """One condition.

    Attributes:
        name: what ``--allow`` takes.
        facts: names of the observations that say it; all of them must.
        compare: a function of :mod:`align.conditions.judge`.
        requested_from: where the demand comes from.
        mend: what to do when it does not hold.
        source: the document that demands it.
        required: whether it stops a comparison; the others inform.
        stage: when it can be judged.
        engines: engines that have such a thing; for the others nothing is to be observed.
        told: path and kind of checkpoint of the finding that is made of it, instead of stopping, where an engine
            computes otherwise than its checkpoint says and nobody asked it to (design §5: a live configuration that
            differs from the checkpoint is a finding).
    """

    name: str
    facts: tuple[str, ...]
    compare: str
    requested_from: str
    mend: str
    source: str
    required: bool = True
    stage: Stage = "launch"
    engines: tuple[str, ...] = ()
    told: tuple[Path, str] | None = None


#: Options that change the model's configuration: what they make false was asked for.
CONFIG_OPTIONS = ("hf_overrides", "rope_scaling_factor")

_NORM: tuple[Path, str] = ("B", "attn_norm")
_ROPE: tuple[Path, str] = ("B", "attn.q_rope")
_ATTENTION: tuple[Path, str] = ("FA", "attn.out")


def _config(
    name: str,
    compare: str = "equal",
    facts: tuple[str, ...] = (),
    mend: str = "",
    told: tuple[Path, str] | None = None,
) -> Row:
    text = mend or "give both engines the same config.json; remove hf_overrides and patches of that side"
    return Row(name, facts or (name,), compare, CONFIG, text, _CONFIG_SOURCE, told=told)


TABLE: tuple[Row, ...] = (
    Row(
        "soc",
        ("soc_version",),
        "soc",
        PROCEDURE,
        "run both sides on the same generation of the chip (the simulated one: ALIGN_SIMNPU_SOC)",
        _STEP_2,
    ),
    Row(
        "warmup",
        ("cache_residue", "start_residue", "dummy_forwards", "warmup_skipped"),
        "warmup",
        PROCEDURE,
        "switch warm-up off: LMDEPLOY_SKIP_WARMUP=1; what other dummy forwards leave in the cache must be zero",
        _STEP_2,
    ),
    Row(
        "eager",
        ("eager", "worker_eager"),
        "equal",
        PROCEDURE,
        "lmdeploy: eager_mode True; vllm: enforce_eager True; " + _OPTION,
        _STEP_2,
    ),
    Row("tp", ("tp", "worker_tp"), "equal", CASE, "ask both engines for the case's tp; " + _OPTION, _STEP_2),
    Row("dp", ("dp", "worker_dp"), "equal", CASE, "ask both engines for the case's dp; " + _OPTION, _STEP_2),
    Row("ep", ("worker_ep",), "equal", CASE, "ask both engines for the case's ep; " + _OPTION, _STEP_2),
    Row(
        "greedy",
        ("greedy", "temperature", "top_k", "penalties"),
        "greedy",
        PROCEDURE,
        "temperature 0 or top_k 1, no penalties: remove the sampling.* options of that side",
        _STEP_2,
        stage="run",
    ),
    Row(
        "token_ids",
        (),
        "token_ids",
        CASE,
        "feed token ids, not text; look for a second BOS or another chat template",
        _STEP_2,
        stage="run",
    ),
    Row(
        "dtype",
        ("dtype", "parameter_dtype", "cache_dtype"),
        "equal",
        CASE,
        "ask both engines for the case's dtype (--dtype); no quantised cache; " + _OPTION,
        "issue 3 part 1",
    ),
    Row(
        "block_size",
        ("block_size", "cache_block_size"),
        "equal",
        CASE,
        "ask both engines for the case's block_size; vllm-ascend forces 128 with prefix caching or chunked prefill",
        "issue 3 part 1",
    ),
    Row(
        "prefix_caching",
        ("prefix_caching",),
        "disabled",
        PROCEDURE,
        "enable_prefix_caching False on both sides; " + _OPTION,
        "issue 3 part 1",
    ),
    Row(
        "chunked_prefill",
        ("chunked_prefill", "max_prefill_tokens"),
        "chunked_prefill",
        PROCEDURE,
        "vllm: enable_chunked_prefill False; both: room for the largest group of prompts in one step "
        "(lmdeploy max_prefill_token_num, vllm max_num_batched_tokens)",
        "issue 3 part 1",
    ),
    Row(
        "async_scheduling",
        ("async_scheduling",),
        "disabled",
        PROCEDURE,
        "vllm: async_scheduling False; " + _OPTION,
        "issue 3 part 1",
    ),
    Row(
        "ascend_config",
        ("ascend_config",),
        "off",
        PROCEDURE,
        "leave additional_config alone, and unset the VLLM_ASCEND_* variables of the switches that are on",
        "issue 3 part 1; vllm-ascend ignores unknown keys, so they are read back",
        engines=("vllm",),
    ),
    Row(
        "checkpoint_files",
        (),
        "files",
        PROCEDURE,
        "give both engines the same checkpoint: copy it again, or name one directory for both",
        "issue 3 part 1",
    ),
    _config("norm_eps", "close", told=_NORM),
    _config("rope_theta", "close", told=_ROPE),
    _config("rope_scaling", told=_ROPE),
    _config("rope_frequencies", "frequencies", told=_ROPE),
    _config("heads"),
    _config("kv_heads"),
    _config("head_dim"),
    _config("attention_scale", "close", told=_ATTENTION),
    _config(
        "window",
        "window",
        ("window", "window_cache"),
        "set use_sliding_window to false in config.json, or run sequences that no window cuts; "
        "dlinfer's attention kernels take no window at all",
    ),
    _config("softcap", "close", told=_ATTENTION),
    _config("tied_head"),
    _config("layers"),
    _config("vocab"),
    _config("hidden"),
    _config("intermediate"),
    _config("routing"),
    Row(
        "expert_placement",
        ("expert_placement",),
        "equal",
        CASE,
        "see how the engine maps experts to ranks: its expert map, its load balancer (EPLB off)",
        "issue 9 part 4",
        required=False,
    ),
    Row(
        "numerics",
        ("numerics",),
        "same",
        "--numerics",
        "only for comparing kernels bit by bit: ask for the same --numerics on both sides",
        "issue 3, shows",
        required=False,
    ),
)

#: All names, in the order in which they are shown.
NAMES: tuple[str, ...] = tuple(row.name for row in TABLE)
