"""What every worker does alike around its model: patches, taps, the audit of weights, the recorder.

An engine's hooks call :meth:`Worker.before_build`, :meth:`Worker.after_load` and :meth:`Worker.after_cache` at the
right moments, and then the step log of the process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adapters.base import EngineSpec
from adapters.probe.births import announce
from adapters.probe.exchanges import wrap_exchanges
from adapters.probe.hung import Hung
from adapters.probe.index_makers import made_at
from adapters.probe.indices import IndexRecorder, hang_up
from adapters.probe.launch import probe_dir, read_launch
from adapters.probe.operator_calls import CallRecorder
from adapters.probe.patch import PatchContext, Patches
from adapters.probe.recorder import Recorder
from adapters.probe.spots import hang_spots, here
from adapters.probe.steplog import process_log
from adapters.probe.taps import Taps, load_taps, signatures
from adapters.probe.weights import LiveWeights, write_audit
from align.checkpoints.table import structure_of
from align.fa.files import FOLDER as CALLS
from align.fa.files import CallWriter
from align.ledger.record.files import FOLDER, LedgerWriter


class Worker:
    """One rank of one engine.

    Args:
        engine: name of the engine whose taps are hung up.
        rank: global rank; ``tp_rank`` inside its tensor-parallel group.
    """

    def __init__(self, engine: str, rank: int, tp_rank: int, dp_rank: int = 0, ep_rank: int = 0) -> None:
        self.engine, self.rank, self.tp_rank, self.dp_rank = engine, rank, tp_rank, dp_rank
        self.spec: EngineSpec = read_launch()
        layout = (self.spec.tp, self.spec.dp, self.spec.ep)
        self._context = partial(PatchContext, self.spec.side, engine, rank, tp_rank, dp_rank, ep_rank, layout)
        self.patches = Patches(self.spec.patches, self._context())
        self.recorder: Recorder | None = None
        self.taps: Taps | None = None
        self._model: Any = None
        self._table = load_taps(engine)
        self._signatures: dict[str, list[str]] = {}
        #: Hung up in this order, with the taps between them.
        self._hung, self._spots = Hung(), Hung()
        #: Of the cache: tokens in a block, keys and values of each layer, and blocks that no request may own.
        self._cache: tuple[int, Sequence[tuple[Any, Any]], tuple[int, ...]] = (0, (), ())
        announce(rank)

    def before_build(self) -> None:
        """The engine is imported; its model is not built yet."""
        self._signatures = signatures(self._table)
        self.patches.apply()
        if self.spec.collectives:
            wrap_exchanges()

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
        self._cache = block_size, caches, reserved
        self._hang_all()

    def repatch(self, files: Sequence[str]) -> None:
        """Other patches in the place of those that are applied, as if the engine had been launched with them.

        Called between two steps, by each rank before its first forward with them. The weights are audited anew, the
        cache is emptied, and what was recorded so far of indices, arguments and collectives is forgotten.

        Raises:
            Mistake: a patch fails; none is applied then.
        """
        self._take_off()
        self.patches.remove()
        self.patches = Patches(files, self._context())
        self.patches.apply()
        self.patches.after_load(self._model)
        for pair in self._cache[1]:
            for tensor in pair:
                tensor.zero_()
        self._hang_all()

    def _take_off(self) -> None:
        log = process_log()
        assert log is not None
        for one in (log.indices, log.calls):
            if one is not None:
                one.close()
        if log.collectives is not None:
            log.collectives.forget()
        log.recorder = log.indices = log.calls = None
        self._spots.remove()
        if self.taps is not None:
            self.taps.remove()
        self._hung.remove()

    def _hang_all(self) -> None:
        block_size, caches, reserved = self._cache
        model_path = Path(self.spec.model_path)
        config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        log = process_log(self.rank, self.dp_rank)
        assert log is not None
        log.repatch = self.repatch
        try:
            structure = structure_of(config, self.spec.tp, self.spec.dp, self.spec.ep)
        except ValueError as error:
            log.note(f"no tensors are recorded: {error}")
            return
        weights = LiveWeights(self._model, structure, self.rank, self.tp_rank, self.engine)
        write_audit(probe_dir(), self.rank, weights.audit(model_path))
        if self.spec.fa:
            log.calls = CallRecorder(CallWriter(probe_dir() / CALLS, self.rank), self.rank)
        if self.spec.audit:
            writer = LedgerWriter(probe_dir() / FOLDER, self.rank)
            made = made_at(self.engine)
            log.indices = IndexRecorder(
                writer, self.rank, structure.layers, reserved, caches, self.dp_rank, made, log.calls
            )
        listener = log.indices or log.calls
        if listener is not None:
            for name, why in hang_up(listener, self._table, self._model, structure.layers, self._hung).items():
                log.note(f"indices and attention arguments not observable: {name}: {why}")
        dtype = next(self._model.parameters()).dtype
        assert isinstance(dtype, torch.dtype)
        self.recorder = Recorder(structure, self.rank, self.tp_rank, weights, block_size, dtype, self.dp_rank)
        self.taps = Taps(
            self._table, self._model, structure, self.tp_rank, self.recorder, self._signatures, self.recorder
        )
        for name, why in self.taps.missing.items():
            log.note(f"not observable: {name}: {why}")
        self.recorder.missing = dict(self.taps.missing)
        if self.spec.collectives:
            self._spots = hang_spots(here, self._table, self._model, structure)
        log.recorder = self.recorder
