"""Routing replay: the candidate is recorded once more along the reference's choice of experts.

Where a router's near-tie flips, right engines compute different things, and nothing behind it is compared. So the
expert ids that the reference recorded are left for the candidate's workers (:mod:`adapters.probe.routing`), which use
them instead of their own; the second recording takes the place of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from torch import Tensor

from adapters.probe.spec import TransplantSpec
from adapters.probe.transplant import RowName, write_tensors
from align.case.schema import CaseLayout
from align.checkpoints.table import kinds
from align.compare.gather import gather
from align.compare.routes import IDS
from align.compare.rows import Recorded, read_rows
from align.compare.tensors import TensorComparison
from align.errors import UserError
from align.findings import Finding
from align.run.traces import open_trace

AUTO, ALWAYS, NEVER = "auto", "always", "never"
#: When the routing is replayed if near-ties hide rows: if nothing else is wrong, whatever is wrong, or never.
MODES = (AUTO, ALWAYS, NEVER)
#: Below the candidate's directory: the reference's ids.
GIVEN = "routing"


def routing_mode(text: str) -> str:
    """``--replay-routing``.

    Raises:
        UserError: another word.
    """
    if text not in MODES:
        raise UserError(f"--replay-routing {text} is not known", f"choose one of {', '.join(MODES)}")
    return text


def can_follow(layout: CaseLayout) -> bool:
    """Whether every rank routes the tokens of its own step, all of them and no others: neither data-parallel groups
    that gather their tokens, nor ranks that divide them among experts.
    """
    return layout.dp == layout.ep == 1


def wants_routing(mode: str, tensors: TensorComparison | None, findings: Sequence[Finding]) -> bool:
    """Whether the candidate is recorded once more.

    Tokens that differ while no tensor says why may follow from what near-ties hide, so that they are no reason against
    it; any other finding is looked at first.
    """
    if mode == NEVER or tensors is None or tensors.routing is None or not tensors.routing.behind:
        return False
    # A side that replayed a routing already is not given another one.
    return not tensors.routing.replayed and (mode == ALWAYS or all(one.kind == "tokens" for one in findings))


def leave_choices(directory: Path, reference: Recorded) -> TransplantSpec | None:
    """Leave the experts that a side chose, layer by layer, in a directory; ``None`` if it recorded none."""
    structure = reference.structure
    if structure is None or not structure.has(kinds()[IDS]):
        return None
    places = read_rows(reference).places
    keys = list(places)
    tensors: dict[str, Tensor] = {}
    rows: dict[str, list[RowName]] = {}
    for layer in range(structure.layers):
        name = kinds()[IDS].at(layer)
        found = gather(reference, name, [places[key] for key in keys])
        if found is not None:
            tensors[name] = found.tensor
            rows[name] = [(keys[row].request, keys[row].position, keys[row].occurrence) for row in found.rows]
    if not tensors:
        return None
    write_tensors(directory, tensors, rows)
    return TransplantSpec(str(directory.absolute()), tuple(tensors))


def choices_of(trace: Path, directory: Path) -> TransplantSpec | None:
    """The same of a trace on the disk."""
    with closing(open_trace(trace)) as reference:
        return leave_choices(directory, reference)
