"""What every worker does alike around its model: patches, taps, the audit of weights, the recorder.

An engine's hooks call :meth:`Worker.before_build`, :meth:`Worker.after_load` and :meth:`Worker.after_cache` at the
right moments, and then the step log of the process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from adapters.base import EngineSpec
from adapters.probe.indices import IndexRecorder, hang_up
from adapters.probe.launch import probe_dir, read_launch
from adapters.probe.patch import PatchContext, Patches
from adapters.probe.recorder import Recorder
from adapters.probe.steplog import process_log
from adapters.probe.taps import Taps, load_taps, signatures
from adapters.probe.weights import LiveWeights, write_audit
from align.checkpoints.table import structure_of
from align.ledger.record.files import FOLDER, LedgerWriter


class Worker:
    """One rank of one engine.

    Args:
        engine: name of the engine whose taps are hung up.
        rank: global rank; ``tp_rank`` inside its tensor-parallel group.
    """

    def __init__(self, engine: str, rank: int, tp_rank: int, dp_rank: int = 0, ep_rank: int = 0) -> None:
        self.engine, self.rank, self.tp_rank = engine, rank, tp_rank
        self.spec: EngineSpec = read_launch()
        layout = (self.spec.tp, self.spec.dp, self.spec.ep)
        context = PatchContext(self.spec.side, engine, rank, tp_rank, dp_rank, ep_rank, layout)
        self.patches = Patches(self.spec.patches, context)
        self.recorder: Recorder | None = None
        self.taps: Taps | None = None
        self._model: Any = None
        self._table = load_taps(engine)
        self._signatures: dict[str, list[str]] = {}

    def before_build(self) -> None:
        """The engine is imported; its model is not built yet."""
        self._signatures = signatures(self._table)
        self.patches.apply()

    def after_load(self, model: Any) -> None:
        """The weights are loaded."""
        self._model = model
        self.patches.after_load(model)

    def after_cache(
        self, block_size: int, caches: Sequence[tuple[Any, Any]] = (), reserved: tuple[int, ...] = ()
    ) -> None:
        """The model and its cache are ready: audit the weights, and hang up the taps and the audit of the cache.

        Args:
            block_size: tokens in one block of the cache.
            caches: keys and values of each layer, ``[blocks, block_size, heads, dim]``.
            reserved: blocks that no request may own.
        """
        model_path = Path(self.spec.model_path)
        config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        log = process_log(self.rank)
        assert log is not None
        try:
            structure = structure_of(config, tp=self.spec.tp)
        except ValueError as error:
            log.note(f"no tensors are recorded: {error}")
            return
        weights = LiveWeights(self._model, structure, self.rank, self.tp_rank)
        write_audit(probe_dir(), self.rank, weights.audit(model_path))
        if self.spec.audit:
            writer = LedgerWriter(probe_dir() / FOLDER, self.rank)
            log.indices = IndexRecorder(writer, self.rank, structure.layers, reserved, caches)
            for name, why in hang_up(log.indices, self._table, self._model, structure.layers).items():
                log.note(f"indices not observable: {name}: {why}")
        dtype = next(self._model.parameters()).dtype
        assert isinstance(dtype, torch.dtype)
        self.recorder = Recorder(structure, self.rank, self.tp_rank, weights, block_size, dtype)
        self.taps = Taps(
            self._table, self._model, structure, self.tp_rank, self.recorder, self._signatures, self.recorder
        )
        for name, why in self.taps.missing.items():
            log.note(f"not observable: {name}: {why}")
        self.recorder.missing = dict(self.taps.missing)
        log.recorder = self.recorder
