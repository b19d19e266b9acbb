"""Operators recomputed from their recorded inputs, and how far a right kernel may be from the result.

Every function takes inputs in the model's dtype (``bfloat16`` or ``float16``), computes in ``compute`` (``float32`` in
the worker, ``float64`` on the driver) and returns :class:`Exact`: the result, and a ``magnitude`` such that the error
of an element of a right kernel is at most ``roundings × u × magnitude``, see :mod:`align.checkpoints.bounds`. The
magnitude is never smaller than the result. A constant ``tiny``, the smallest normal number, is added to it, because
numbers below it are rounded to a grid of ``u × tiny``.

Leading axes (layers) are free: all functions of the dense models broadcast over them.
"""

from align.checkpoints.recompute.attend import attention
from align.checkpoints.recompute.exact import Exact, tiny
from align.checkpoints.recompute.gated import ACTIVATIONS, gated, silu_mul
from align.checkpoints.recompute.matmul import linear, linear_magnitude, soft_cap
from align.checkpoints.recompute.rotary import ROPE_TYPES, rope, rope_frequencies
from align.checkpoints.recompute.routed import (
    Routing,
    choice_excess,
    expert_mix,
    expert_scores,
    expert_weights,
    gated_mlp,
)
from align.checkpoints.recompute.rows import add, embedding, gated_add, identity, rms_norm, scaled

__all__ = [
    "ACTIVATIONS",
    "ROPE_TYPES",
    "Exact",
    "Routing",
    "add",
    "attention",
    "choice_excess",
    "embedding",
    "expert_mix",
    "expert_scores",
    "expert_weights",
    "gated",
    "gated_add",
    "gated_mlp",
    "identity",
    "linear",
    "linear_magnitude",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "scaled",
    "silu_mul",
    "soft_cap",
    "tiny",
]
