"""Mirrors torch_npu.contrib."""
