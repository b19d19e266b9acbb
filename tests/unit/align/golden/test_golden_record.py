"""Golden's checkpoints against a plain forward of transformers, a forward written anew, and its own formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.transformers.tensors import ABSENT, Watcher
from align.checkpoints.table import structure_of
from align.compare.rows import RowKey, read_rows
from align.golden.record import Followed, already, load_model, record
from align.models import qwen3
from align.models.info import ModelInfo, read_info
from align.trace.reader import Trace
from tests.unit.align.compare import rounded
from tests.unit.align.golden import tiny

SEQUENCES = (Followed("r0", (5,), (7, 9)), Followed("r1", (3, 60, 11, 2, 8), (1, 4)))


@pytest.fixture(scope="module", params=["Llama", "Qwen2", "Qwen3"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelInfo, Any, Trace]:
    folder = tmp_path_factory.mktemp(request.param)
    info = tiny.build(folder / "model", request.param)
    model = load_model(info)
    return info, model, record(model, info, SEQUENCES, folder / "trace")


def test_logits_are_those_of_a_plain_forward(recorded: tuple[ModelInfo, Any, Trace]) -> None:
    from transformers import AutoModelForCausalLM

    info, _, trace = recorded
    plain = AutoModelForCausalLM.from_pretrained(info.path, dtype=torch.float32)
    for step, sequence in enumerate(SEQUENCES):
        with torch.no_grad():
            whole = plain(torch.tensor([sequence.ids])).logits[0]
        found = trace.joined(step, "logits")
        assert found is not None and found.dtype == torch.float32
        torch.testing.assert_close(found, whole[len(sequence.prompt) - 1 :], atol=1e-5, rtol=1e-5)


def test_rows_are_positions(recorded: tuple[ModelInfo, Any, Trace]) -> None:
    _, _, trace = recorded
    rows = read_rows(trace)
    assert rows.places.keys() == {
        RowKey(one.name, position, 0) for one in SEQUENCES for position in range(len(one.ids))
    }
    for one in SEQUENCES:
        for position, token in enumerate(one.ids):
            key = RowKey(one.name, position, 0)
            assert rows.fed["token_ids"][key] == token and rows.fed["positions"][key] == position
            heads = position - len(one.prompt) + 1
            assert rows.places[key].head == (heads if heads >= 0 else None)
    embed = trace.joined(1, "embed")
    assert embed is not None
    assert torch.equal(embed[1], recorded[1].model.embed_tokens.weight[60])


def test_every_checkpoint_but_the_absent_ones_is_there(recorded: tuple[ModelInfo, Any, Trace]) -> None:
    info, _, trace = recorded
    names = {str(name): name for name in structure_of(info.config).names()}
    assert trace.keys(0, 0) == {text for text, name in names.items() if name.kind.name not in ABSENT} | {
        "token_ids",
        "positions",
    }
    for text, name in names.items():
        found = trace.joined(1, text)
        if found is not None:
            structure = trace.structure
            rows = 3 if text == "logits" else 7
            assert found.shape == (rows, *(structure.size(axis) for axis in name.kind.axes[1:])), text


def test_checkpoints_obey_their_formulas(recorded: tuple[ModelInfo, Any, Trace]) -> None:
    """Each operator again, from the checkpoints that it reads, in float64."""
    info, model, trace = recorded

    def at(name: str, layer: int = 1) -> torch.Tensor:
        found = trace.joined(1, f"layers.{layer}.{name}")
        assert found is not None, name
        return found.double()

    def close(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)

    layer = model.model.layers[1].double()
    try:
        eps = info.config["rms_norm_eps"]

        def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            scaled: torch.Tensor = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
            return scaled

        close(at("block_in"), at("mid", 0) + at("mlp.down", 0))
        close(at("attn_norm"), norm(at("block_in"), layer.input_layernorm.weight))
        for part in "qkv":
            close(at(f"attn.{part}").flatten(1), getattr(layer.self_attn, f"{part}_proj")(at("attn_norm")))
        before = {}
        for part in "qk":
            before[part] = at(f"attn.{part}")
            if hasattr(layer.self_attn, f"{part}_norm"):
                before[part] = norm(before[part], getattr(layer.self_attn, f"{part}_norm").weight)
                close(at(f"attn.{part}_norm"), before[part])
        dim = info.head_dim
        theta = (info.config.get("rope_parameters") or {}).get("rope_theta") or info.config["rope_theta"]
        angles = torch.arange(7).double()[:, None] * theta ** (-torch.arange(0, dim, 2).double() / dim)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        for part in "qk":
            one, two = before[part].chunk(2, -1)
            close(at(f"attn.{part}_rope"), torch.cat([one * cos - two * sin, two * cos + one * sin], -1))
        assert torch.equal(at("attn.key_states"), at("attn.k_rope"))
        assert torch.equal(at("attn.value_states"), at("attn.v"))
        q, k, v = (at(f"attn.{part}").transpose(0, 1) for part in ("q_rope", "k_rope", "v"))
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
        scores = (q @ k.transpose(1, 2)) * dim**-0.5
        scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
        close(at("attn.out"), (scores.softmax(-1) @ v).transpose(0, 1))
        close(at("attn.o"), layer.self_attn.o_proj(at("attn.out").flatten(1)))
        close(at("mid"), at("block_in") + at("attn.o"))
        close(at("mlp_norm"), norm(at("mid"), layer.post_attention_layernorm.weight))
        close(at("mlp.act"), torch.nn.functional.silu(at("mlp.gate")) * at("mlp.up"))
        close(at("mlp.down"), layer.mlp.down_proj(at("mlp.act")))
    finally:
        layer.float()


def test_a_gemma_scales_its_embedding_and_has_norms_behind_its_blocks(tmp_path: Path) -> None:
    gemma = {
        "head_dim": 16, "query_pre_attn_scalar": 9, "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "layer_types": ["full_attention"] * 2, "sliding_window": None,
    }  # fmt: skip
    info = tiny.build(tmp_path / "model", "Gemma2", **gemma)
    model = load_model(info)
    trace = record(model, info, SEQUENCES, tmp_path / "trace")
    names = {str(name) for name in structure_of(info.config).names() if name.kind.name not in ABSENT}
    assert trace.keys(0, 0) == names | {"token_ids", "positions"}

    def at(name: str) -> torch.Tensor:
        found = trace.joined(1, name)
        assert found is not None, name
        return found.double()

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + weight.double())
        return scaled

    def close(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)

    layer, ids = model.model.layers[1], torch.tensor(SEQUENCES[1].ids)
    close(at("embed"), model.model.embed_tokens.weight[ids].double())
    close(at("layers.0.block_in"), at("embed") * 32**0.5)
    close(at("layers.1.block_in"), at("layers.0.mid") + at("layers.0.mlp.post_norm"))
    for name, source, module in (
        ("attn_norm", "block_in", layer.input_layernorm),
        ("attn.post_norm", "attn.o", layer.post_attention_layernorm),
        ("mlp_norm", "mid", layer.pre_feedforward_layernorm),
        ("mlp.post_norm", "mlp.down", layer.post_feedforward_layernorm),
    ):
        close(at(f"layers.1.{name}"), norm(at(f"layers.1.{source}"), module.weight))
    close(at("layers.1.mid"), at("layers.1.block_in") + at("layers.1.attn.post_norm"))
    q, k, v = (at(f"layers.1.attn.{part}").transpose(0, 1) for part in ("q_rope", "k_rope", "v"))
    k, v = (x.repeat_interleave(2, 0) for x in (k, v))
    scores = (q @ k.transpose(1, 2) / 3).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    close(at("layers.1.attn.out"), (scores.softmax(-1) @ v).transpose(0, 1))


def test_qwen3_against_a_forward_written_anew(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3"
    folder.mkdir()
    qwen3.build(folder, lambda line: None)
    info = read_info(folder)
    ids = qwen3.default_prompts()[2]
    trace = record(load_model(info), info, [Followed("r", ids[:-4], ids[-4:])], tmp_path / "trace")
    own = rounded.forward(ids, native=False, dtype=torch.float32)
    for name, expected in own.items():
        found = trace.joined(0, name)
        assert found is not None, name
        expected = expected[len(ids) - 5 :] if name == "logits" else expected
        assert (found - expected).norm() <= 2e-5 * expected.norm(), name


def test_what_is_there_is_used_again_and_nothing_else(tmp_path: Path) -> None:
    info = tiny.build(tmp_path / "model", "Llama")
    record(load_model(info), info, SEQUENCES, tmp_path / "trace").close()
    again = already(tmp_path / "trace", info, SEQUENCES)
    assert again is not None and again.manifest["golden"]["forward"].startswith("one prefill")
    assert already(tmp_path / "trace", info, SEQUENCES[:1]) is None
    other = tiny.build(tmp_path / "other", "Llama", intermediate_size=64)
    assert already(tmp_path / "trace", other, SEQUENCES) is None
    assert already(tmp_path / "nowhere", info, SEQUENCES) is None


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    from transformers.models.llama import modeling_llama

    info = tiny.build(tmp_path / "model", "Llama")
    model, before = load_model(info), modeling_llama.eager_attention_forward
    watcher = Watcher(model, structure_of(info.config))
    with pytest.raises(RuntimeError, match="stop"), watcher:
        raise RuntimeError("stop")
    assert modeling_llama.eager_attention_forward is before
    model(torch.tensor([[1, 2]]))
    assert not watcher.take()


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    info = tiny.build(tmp_path / "model", "Llama")
    deeper = structure_of({**info.config, "num_hidden_layers": 3})
    with pytest.raises(ValueError, match="layers of 3"):
        Watcher(load_model(info), deeper)
