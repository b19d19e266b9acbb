"""Results of each path for tests of the page: made by the real judges over scripted sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.result.cells import Cell, CellSpread, DriftPoint, OwnError, RowShare, SliceShare
from align.result.schema import Result
from tests.unit.align.report import test_arguments_shown, test_collectives_shown, test_indices_shown
from tests.unit.align.result import made

#: Columns of the large map.
KINDS = (
    "block_in", "attn_norm", "attn.q", "attn.k", "attn.v", "attn.q_norm", "attn.k_norm", "attn.q_rope", "attn.k_rope",
    "attn.key_states", "attn.value_states", "attn.kv_start_indices", "attn.out", "attn.o", "mid", "mlp_norm",
    "mlp.gate", "mlp.up", "mlp.act", "mlp.down",
)  # fmt: skip
LAYERS, STEPS = 64, 32
#: The layer from which on the large result is wrong.
WRONG = 40


def result_of(path: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    """``clean``, or one finding of path ``A``, ``B``, ``C`` or ``FA``."""
    if path == "A":
        return test_indices_shown.report_with(directory, monkeypatch, "F01")[1]
    if path == "C":
        return test_collectives_shown.told(directory, monkeypatch, 1.0)[1]
    if path == "FA":
        directory.mkdir()
        return test_arguments_shown.told(directory, monkeypatch, True)[1]
    return made.Run(directory, monkeypatch, made.wrong_up if path == "B" else None).go().result()


def large(result: Result) -> Result:
    """The same with 64 layers of 20 checkpoints, each over 32 steps."""
    assert result.tensors is not None
    cells = [_cell(layer, kind) for layer in range(LAYERS) for kind in KINDS]
    drift = [
        DriftPoint(
            layer=layer,
            error=0.01 * (layer + 1) ** 0.5 * (30 if layer > WRONG else 1),
            predicted=0.01 * (layer + 1) ** 0.5,
            bound=0.04 * (layer + 1) ** 0.5,
        )
        for layer in range(LAYERS)
    ]
    return result.model_copy(update={"tensors": result.tensors.model_copy(update={"cells": cells, "drift": drift})})


def _cell(layer: int, kind: str) -> Cell:
    error = 0.0123 * (layer + 1) ** 0.5 * (30 if layer > WRONG else 1)
    bound = 0.04 * (layer + 1) ** 0.5
    own = {
        side: OwnError(
            verdict="within", why="", operator="linear", rows=128, phase="decode", rank=0,
            test="element", value=1.234, allowed=4.08, ratio=0.3025,
        )
        for side in ("candidate", "reference")
    }  # fmt: skip
    return Cell(
        name=f"layers.{layer}.{kind}",
        layer=layer,
        kind=kind,
        verdict="beyond" if layer > WRONG else "within",
        inputs="beyond" if layer > WRONG else "within",
        why=f"relative L2 {error:.4g} is above the bound {bound:.4g}",
        rows=4096,
        shape=[4096, 8, 128],
        dtypes={"candidate": "bfloat16", "reference": "bfloat16"},
        estimated=False,
        error=float(f"{error:.4g}"),
        bound=float(f"{bound:.4g}"),
        ratio=float(f"{error / bound:.4g}"),
        bounds={"token": 0.12, "channel": 0.12, "head": 0.06},
        predicted=0.0123,
        judged_by="derived",
        max_abs=0.0312,
        max_rel=12.34,
        cosine=0.99991234,
        seed=False,
        spread=CellSpread(
            shares=[0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0],
            quantiles=[0.001, 0.002, 0.003, 0.004, 0.005, 0.006, float(f"{error:.4g}")],
            steps={str(step): float(f"{error * (1 + step / 99):.4g}") for step in range(STEPS)},
            rows=[RowShare(request=f"r{at}", position=17 * at, rel_l2=0.0123) for at in range(5)],
            channels=[SliceShare(index=at, rel_l2=0.0123) for at in range(5)],
            heads=[SliceShare(index=at, rel_l2=0.0123) for at in range(5)],
        ),
        own=own,
    )
