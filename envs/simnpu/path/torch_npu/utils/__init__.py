"""Mirrors torch_npu.utils."""
