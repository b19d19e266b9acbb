"""What the report says of a paired run: the outcome, what came and went, and what makes it inconclusive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from align.result.pair import fault_said
from align.result.schema import Result
from align.sentences import raw


def lines(result: Result) -> Iterator[tuple[str, dict[str, Any]]]:
    """Keys of the report's words with what fills them; nothing if the run repeats no other."""
    paired = result.paired
    if paired is None:
        return
    yield "paired.said", {"what": paired.told or raw(paired.what)}
    for key, faults in (("gone", paired.gone), ("appeared", paired.appeared)):
        for fault in faults:
            yield f"paired.{key}", {"fault": fault_said(fault), "earlier": paired.earlier}
    if paired.outcome == "moved":
        yield "paired.again", {}
    for one in paired.confounded:
        values = {"before": one.before or "@paired.none", "after": one.after or "@paired.none"}
        yield "paired.confounded", {"what": f"@paired.{one.what}", "name": one.name, **values}
    if paired.outcome != "unknown" and not paired.conclusive:
        yield "paired.inconclusive", {}
