"""Mirrors the package of this name in torch_npu."""
