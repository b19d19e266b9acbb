"""A worker whose patches are changed while it lives: as if it had been launched with the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from adapters.base import EngineSpec
from adapters.mistakes import Mistake
from adapters.probe import steplog, worker
from adapters.probe.launch import write_launch
from adapters.probe.taps import Tap
from adapters.probe.worker import Worker
from align.models import qwen3

LAYERS = 2
#: The one site that both the attention's listener and the taps are hung up at.
TAPS = (Tap("attn.out", "model.layers.{i}.attn", "forward", "*:forward", "out", "heads"),)


class Attention(nn.Module):
    def forward(self, query: torch.Tensor, attn_metadata: Any = None) -> torch.Tensor:
        return query * 2


def model() -> Any:
    layers = []
    for _ in range(LAYERS):
        layer = SimpleNamespace(attn=Attention(), weight=nn.Parameter(torch.ones(2, 2)))
        layers.append(layer)
    found = SimpleNamespace(model=SimpleNamespace(layers=layers))
    found.parameters = lambda: iter([layers[0].weight])
    return found


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A worker after its cache was built, its model and the cache."""
    monkeypatch.setenv("ALIGN_PROBE_DIR", str(tmp_path))
    monkeypatch.setattr(steplog, "_log", None)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**qwen3.CONFIG, "num_hidden_layers": LAYERS}))
    write_launch(EngineSpec("vllm", "reference", str(folder), "bfloat16", str(tmp_path), block_size=4))
    monkeypatch.setattr(worker, "load_taps", lambda engine: TAPS)
    audited: list[torch.Tensor] = []

    class Weights:
        def __init__(self, root: Any, *_: Any) -> None:
            self.root = root

        def audit(self, path: Path) -> Any:
            audited.append(self.root.model.layers[0].weight.detach().clone())
            return SimpleNamespace()

    monkeypatch.setattr(worker, "LiveWeights", Weights)
    monkeypatch.setattr(worker, "write_audit", lambda *given: None)
    root = model()
    made = Worker("vllm", 0, 0)
    made.before_build()
    made.after_load(root)
    cache = [(torch.zeros(3, 4, 2, 128), torch.zeros(3, 4, 2, 128)) for _ in range(LAYERS)]
    steplog.process_log(0)
    made.after_cache(4, cache, (0,))
    yield SimpleNamespace(worker=made, model=root, cache=cache, audited=audited, directory=tmp_path)
    made.repatch(())


def patch(directory: Path, name: str, body: str) -> str:
    path = directory / f"{name}.py"
    path.write_text(
        f"def apply(ctx):\n    pass\n\n\ndef after_load(ctx):\n    layer = ctx.model.model.layers[0]\n{body}"
    )
    return str(path)


FACTOR = """    original = layer.attn.forward
    ctx.replace(layer.attn, "forward", lambda *args, **kwargs: original(*args, **kwargs) * {})
"""
WEIGHT = "    ctx.assign(layer.weight, 5.0, at=1)\n"


def test_one_patch_takes_the_place_of_another(live: Any) -> None:
    def out() -> float:
        return float(live.model.model.layers[0].attn.forward(torch.ones(1), attn_metadata=None))

    assert out() == 2
    for factor in (3, 5):  # not three times five
        live.worker.repatch([patch(live.directory, f"by{factor}", FACTOR.format(factor))])
        assert out() == 2 * factor
    live.worker.repatch(())
    assert out() == 2


def test_weights_come_back_and_are_audited_each_time(live: Any) -> None:
    live.worker.repatch([patch(live.directory, "weight", WEIGHT)])
    live.worker.repatch(())
    assert [one[1].tolist() for one in live.audited] == [[1, 1], [5, 5], [1, 1]]
    assert torch.equal(live.model.model.layers[0].weight, torch.ones(2, 2))


def test_the_cache_is_empty_and_records_begin_anew(live: Any) -> None:
    for pair in live.cache:
        pair[0].fill_(3)
    records = live.directory / "ledger" / "rank0.jsonl"
    before = steplog.process_log()
    assert before is not None
    old = before.indices
    live.worker.repatch(())
    assert not any(bool(tensor.any()) for pair in live.cache for tensor in pair)
    assert before.indices is not None and before.indices is not old and before.calls is not None
    assert records.is_file() and records.read_text() == ""


def test_a_patch_that_fails_is_told_and_leaves_none(live: Any) -> None:
    with pytest.raises(Mistake, match="after_load"):
        live.worker.repatch([patch(live.directory, "bad", "    ctx.replace(layer, 'invented', 1)\n")])
    assert float(live.model.model.layers[0].attn.forward(torch.ones(1))) == 2
