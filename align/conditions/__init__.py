"""Conditions: what must hold on both sides before their tensors say anything about each other.

Each is requested, read back from the live engine, and judged. What could not be read back is ``unknown``, never ``ok``.
"""

from align.conditions.check import blocking, refuse, require_names
from align.conditions.evaluate import SideFacts, evaluate
from align.conditions.files import file_hashes
from align.conditions.table import LAUNCH, NAMES, RUN, TABLE, Row
from align.conditions.told import with_configuration
from align.conditions.types import Condition

__all__ = [
    "LAUNCH",
    "NAMES",
    "RUN",
    "TABLE",
    "Condition",
    "Row",
    "SideFacts",
    "blocking",
    "evaluate",
    "file_hashes",
    "refuse",
    "require_names",
    "with_configuration",
]
