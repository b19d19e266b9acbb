"""Checks of the arguments of FlashAttention and cache operators, before they are called.

Wrong attention arguments do not raise; they ruin precision in silence. ``from align.fa import check_attention`` works
in any model file that has torch, and so do the seven functions of :mod:`align.fa.debug`. A check is no verdict about
precision: that needs a comparison of numbers.
"""

from align.fa.call import PATHS, PHASES, Call, Context, MaskFacts, TensorFacts, call_record, read_call
from align.fa.check import Checker, check_attention, check_call
from align.fa.debug import (
    debug_actual_seq_lengths,
    debug_atten_mask,
    debug_fa_all_params,
    debug_fa_layout_shape,
    debug_fa_version_params,
    debug_inner_precise,
    debug_mla_rope,
)
from align.fa.describe import Describer
from align.fa.outcome import SEVERITIES, Finding, Report
from align.fa.rules import Rule, rules
from align.fa.text import parse_tensor

__all__ = [
    "PATHS",
    "PHASES",
    "SEVERITIES",
    "Call",
    "Checker",
    "Context",
    "Describer",
    "Finding",
    "MaskFacts",
    "Report",
    "Rule",
    "TensorFacts",
    "call_record",
    "check_attention",
    "check_call",
    "debug_actual_seq_lengths",
    "debug_atten_mask",
    "debug_fa_all_params",
    "debug_fa_layout_shape",
    "debug_fa_version_params",
    "debug_inner_precise",
    "debug_mla_rope",
    "parse_tensor",
    "read_call",
    "rules",
]
