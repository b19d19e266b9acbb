"""Runs golden and writes its trace, which is read as any other side's.

One forward over prompt and generated tokens: in float32 that differs from a prefill and decode steps by the order of
sums alone, about 2^-24 of a value, and both sides are 2^16 times that away in bfloat16. The manifest says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from adapters.base import RowSpan
from adapters.transformers.tensors import ABSENT, Watcher, fill_window
from align.checkpoints.table import Structure, kinds, structure_of
from align.golden.experts import digest_of
from align.models.info import ModelInfo
from align.run.directory import disk_error
from align.trace.format import MANIFEST, POSITIONS, SCHEMA, TOKEN_IDS, StepEntry
from align.trace.reader import Trace
from align.trace.writer import TraceWriter

Say = Callable[[str], None]
DTYPE = "float32"
ENGINE = "transformers"


@dataclass(frozen=True)
class Followed:
    """One request.

    Attributes:
        name: of the request.
        prompt: ids ``[P]``.
        generated: ids ``[N]`` that both sides were forced along.
        experts: by layer, the experts ``[P + N, top_k]`` that its routers follow, see
            :attr:`adapters.transformers.tensors.Watcher.experts`.
    """

    name: str
    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    experts: Mapping[int, torch.Tensor] = field(default_factory=dict, compare=False)

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt, *self.generated)


def load_model(info: ModelInfo) -> Any:
    """The checkpoint in float32 on the CPU, with eager attention."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        info.path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    fill_window(model.config)
    return model.eval()


def record(
    model: Any, info: ModelInfo, sequences: Sequence[Followed], directory: Path, say: Say = lambda line: None
) -> Trace:
    """Run every sequence and write the trace.

    Args:
        model: of :func:`load_model`.
        directory: of the trace; replaced if there is one.

    Raises:
        UserError: the disk is full or not writable.
        ValueError: the model is not built as the known ones are.
    """
    structure = structure_of(info.config)
    (directory / MANIFEST).unlink(missing_ok=True)  # one that breaks off must not look whole
    try:
        with closing(TraceWriter(directory, 0)) as writer, Watcher(model, structure) as watcher:
            for step, sequence in enumerate(sequences):
                say(f"{sequence.name}: {len(sequence.ids)} tokens")
                entry, tensors = run_one(model, watcher, sequence, step)
                writer.write_step(entry, tensors)
        content = json.dumps(manifest(info, structure, sequences), ensure_ascii=False)
        temporary = directory / f"{MANIFEST}.tmp"
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, directory / MANIFEST)
    except OSError as error:
        raise disk_error(error, directory) from error
    return Trace(directory)


def run_one(model: Any, watcher: Watcher, sequence: Followed, step: int) -> tuple[StepEntry, dict[str, torch.Tensor]]:
    """One sequence as one step: rows are its positions from 0, the head's rows those from which a token follows."""
    ids = torch.tensor([sequence.ids])
    watcher.experts = sequence.experts
    with torch.inference_mode():
        model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False)
    tensors = dict(watcher.take())
    first = len(sequence.prompt) - 1
    tensors["logits"] = tensors["logits"][first:].contiguous()
    tensors[TOKEN_IDS], tensors[POSITIONS] = ids[0], torch.arange(ids.shape[1])
    heads = range(first, len(sequence.ids))
    entry = StepEntry(
        step=step,
        phase="prefill",
        rows=(RowSpan(sequence.name, 0, len(sequence.ids)),),
        logits_rows=tuple((sequence.name, position) for position in heads),
    )
    return entry, tensors


def manifest(info: ModelInfo, structure: Structure, sequences: Sequence[Followed]) -> dict[str, Any]:
    """The trace's, JSON-able."""
    import transformers

    experts = {one.name: digest_of(one.experts) for one in sequences if one.experts}
    return {
        "schema": SCHEMA,
        "side": "golden",
        "engine": ENGINE,
        "dtype": DTYPE,
        "model": dict(info.config),
        "model_name": info.name,
        "model_info": {**asdict(info), "path": str(info.path), "config": None},
        "layout": {"tp": 1, "dp": 1, "ep": 1},
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "simulated": False,
        "requests": [
            {"name": one.name, "prompt_len": len(one.prompt), "token_ids": list(one.prompt)} for one in sequences
        ],
        "generations": {
            "replay": [
                {"request": one.name, "steps": [{"chosen": token} for token in one.generated]} for one in sequences
            ]
        },
        "golden": {
            "attention": "eager",
            "forward": "one prefill over prompt and generated tokens",
            "absent": {
                kind: why for kind, why in ABSENT.items() if structure.has(kinds()[kind]) and not why.endswith("rank")
            },
            **({"experts": experts} if experts else {}),
        },
    }


def already(directory: Path, info: ModelInfo, sequences: Sequence[Followed]) -> Trace | None:
    """A whole trace of the same model, versions and tokens that is there already; ``None`` if there is none."""
    try:
        found = Trace(directory)
    except (ValueError, KeyError, TypeError):
        return None
    wanted = json.loads(json.dumps(manifest(info, structure_of(info.config), sequences)))
    same = {key: value for key, value in found.manifest.items() if key != "model_info"} == {
        key: value for key, value in wanted.items() if key != "model_info"
    }
    if same and _fingerprint(found.manifest) == info.fingerprint:
        return found
    found.close()
    return None


def _fingerprint(content: Mapping[str, Any]) -> str:
    return str((content.get("model_info") or {}).get("fingerprint"))
