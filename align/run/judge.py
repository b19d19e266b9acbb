"""From two traces to findings; a joint run and ``align compare`` judge alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch

from align.checkpoints.table import Name, parse
from align.compare.locate import locate
from align.compare.policy import TensorPolicy
from align.compare.rows import Recorded
from align.compare.tensors import TensorComparison, compare_traces
from align.compare.tokens import TokenComparison
from align.errors import UserError
from align.findings import Finding
from align.run.verdict import tokens_verdict


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: tensors are many and small, and threads that wait for each other on a busy machine make
    a comparison of seconds take minutes.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def policy_for(reference: Recorded, name: Literal["derived", "seed"]) -> TensorPolicy:
    """The thresholds for the reference's model."""
    config: Mapping[str, Any] = reference.manifest.get("model") or {}
    layers = int(config.get("num_hidden_layers") or 1)
    make = TensorPolicy.derived if name == "derived" else TensorPolicy.seed
    return make(reference.dtype, layers, quantised=bool(config.get("quantization_config")))


def judge_tensors(
    candidate: Recorded,
    reference: Recorded,
    policy: Literal["derived", "seed"],
    comparisons: Mapping[str, TokenComparison],
    progress: Callable[[str], None] | None = None,
) -> tuple[TensorComparison, tuple[Finding, ...]]:
    """Compare two traces and say what is wrong, the headline first.

    Args:
        comparisons: of the tokens, by mode; empty if there are none.
        progress: hears where the comparison is.

    Raises:
        UserError: a trace cannot be read at all, or nothing in it can be compared.
    """

    def at(done: int, total: int, name: str) -> None:
        if progress is not None:
            progress(f"{done}/{total} {name}")

    try:
        with one_thread():
            compared = compare_traces(candidate, reference, policy_for(reference, policy), at)
    except ValueError as error:
        raise UserError(f"the traces cannot be compared: {error}", "record them again: align capture") from error
    if not any(one.compared for one in compared.checkpoints):
        why = next((one.why for one in compared.checkpoints), "nothing was recorded")
        raise UserError(
            f"no tensor is on both sides: {why}",
            "record both sides with one case: align run, or align capture twice; name .pt files alike",
        )
    audits = {"candidate": candidate.manifest.get("weights", ()), "reference": reference.manifest.get("weights", ())}
    differ = bool(comparisons) and tokens_verdict(comparisons) == "diverged"
    return compared, tuple(locate(compared, audits, differ))


def accused(tensors: TensorComparison | None, findings: Iterable[Finding]) -> tuple[Name, ...]:
    """Checkpoints that a closer look would help with: where the findings point, then what is beyond, in order."""
    names = [finding.checkpoint for finding in findings if finding.checkpoint is not None]
    if tensors is not None:
        names += [one.name for one in tensors.checkpoints if one.verdict == "beyond"]
    found = []
    for name in dict.fromkeys(names):
        try:
            found.append(parse(name))
        except ValueError:  # hand-written files have names of their own
            continue
    return tuple(found)
