"""The canonical checkpoints: names, shapes, order, and the operators that produce them."""

from align.checkpoints.table import Kind, Name, Structure, kinds, parse, structure_of

__all__ = ["Kind", "Name", "Structure", "kinds", "parse", "structure_of"]
