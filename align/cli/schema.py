"""``align schema``: the format of ``result.json``."""

from __future__ import annotations

import json
import sys

from align.errors import EXIT_ALIGNED
from align.result.schema import json_schema


def execute() -> int:
    """Print the JSON Schema."""
    sys.stdout.write(json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n")
    return EXIT_ALIGNED
