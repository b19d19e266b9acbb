"""The golden engine: Hugging Face transformers, run in the driver's own environment."""

from adapters.transformers.adapter import TransformersAdapter

__all__ = ["TransformersAdapter"]
