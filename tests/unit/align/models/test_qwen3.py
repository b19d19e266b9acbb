"""The qwen3 preset: the same bytes everywhere, a real Qwen3, varied output, a tokenizer for any text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from align.models import qwen3
from align.models.files import read_prompts

#: Pinned: whoever changes what is built must raise RECIPE_VERSION, or old and new share a directory.
WEIGHTS_SHA256 = "174ea18ae05106c39393736e40e81a74d18bc6bff43a887689ea304cf446883f"
CONFIG_SHA256 = "e87e4b87f2684cc046eb82710fb1f961ba7f3158d1c28358c3cd5e60f882e4d8"
TOKENIZER_SHA256 = "6be212fd9b7264a825422dbb5828b0494e04b1cec42c159451d6a34bf6dd0063"
MQA_SHA256 = "04c6318a02a00ad1c73c2fcfb8e84832d82a27f85359bf6f6dfa3cd1fb5c9d96"
FIRST_PROMPTS = ((623,), (752, 26, 598, 428, 509, 149, 128))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    qwen3.build(folder, lambda line: None)
    return folder


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_bytes_are_pinned(checkpoint: Path) -> None:
    assert digest(checkpoint / "model.safetensors") == WEIGHTS_SHA256
    assert digest(checkpoint / "config.json") == CONFIG_SHA256
    assert digest(checkpoint / "tokenizer.json") == TOKENIZER_SHA256
    assert qwen3.default_prompts()[:2] == FIRST_PROMPTS


def test_bell_is_standard_and_independent_of_the_count() -> None:
    values = qwen3.bell(7, "some.name", 200_000)
    assert values.dtype == np.float32
    assert abs(float(values.mean())) < 0.01
    assert abs(float(values.std()) - 1.0) < 0.01
    assert np.array_equal(qwen3.bell(7, "some.name", 10), values[:10])
    assert not np.array_equal(qwen3.bell(7, "other.name", 10), values[:10])
    assert not np.array_equal(qwen3.bell(8, "some.name", 10), values[:10])


def test_bell_by_hand() -> None:
    word = int(np.random.PCG64(np.random.SeedSequence([1, 0x8587D865])).random_raw())  # crc32 of "abcde"
    quarters = [(word >> shift) & 0xFFFF for shift in (0, 16, 32, 48)]
    expected = (sum(quarters) - 2 * 65535) / (4 * (65536**2 - 1) / 12) ** 0.5
    assert float(qwen3.bell(1, "abcde", 1)[0]) == pytest.approx(expected, rel=1e-6)


def test_transformers_finds_every_parameter(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, output_loading_info=True)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    stored = load_file(checkpoint / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == dict(qwen3.shapes())
    assert all(torch.equal(parameter, stored[name]) for name, parameter in model.named_parameters())


def test_config_means_the_same_to_transformers(checkpoint: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint)
    for key, value in qwen3.CONFIG.items():
        if key not in ("rope_theta", "rope_scaling", "torch_dtype"):
            assert getattr(config, key) == value, key
    assert config.rope_parameters["rope_theta"] == qwen3.CONFIG["rope_theta"]
    assert config.dtype == torch.bfloat16


def test_bfloat16_weights_are_exact_in_float16(checkpoint: Path) -> None:
    """One stored checkpoint serves both dtypes: what float16 drops is below its smallest normal number."""
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        loss = (tensor.to(torch.float16).float() - tensor.float()).abs().max().item()
        assert loss < 2**-24, name


def test_default_prompts(checkpoint: Path) -> None:
    prompts = qwen3.default_prompts()
    assert tuple(len(ids) for ids in prompts) == (1, 7, 33, 200)
    assert all(len(qwen3.SPECIAL) <= token < qwen3.FIRST_RESERVED for ids in prompts for token in ids)
    assert len({ids[0] for ids in prompts}) == 4, "no prompt may begin another"
    assert read_prompts(checkpoint) == tuple((ids, None) for ids in prompts)


def test_greedy_output_is_varied(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    produced = []
    for ids in qwen3.default_prompts():
        prompt = torch.tensor([ids])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=16,
            min_new_tokens=16,
        )
        produced.append(output[0, len(ids) :].tolist())
    assert all(len(set(tokens)) >= 12 for tokens in produced)
    assert len({token for tokens in produced for token in tokens}) >= 50


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> object:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


@given(text=st.text(max_size=40))
@settings(deadline=None)
def test_any_text_survives_the_tokenizer(tokenizer: object, text: str) -> None:
    ids = tokenizer.encode(text)  # type: ignore[attr-defined]
    assert tokenizer.decode(ids) == text  # type: ignore[attr-defined]
    assert all(0 <= token < qwen3.VOCAB for token in ids)


def test_tokenizer_specials_and_template(tokenizer: object) -> None:
    bos, eos, pad = (getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad"))
    assert (bos, eos, pad) == (qwen3.BOS, qwen3.EOS, qwen3.PAD)
    assert len(tokenizer) == qwen3.VOCAB  # type: ignore[arg-type]
    rendered = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<bos>user: hi\nassistant: "


def test_files_are_json_for_people(checkpoint: Path) -> None:
    assert json.loads((checkpoint / "config.json").read_text()) == qwen3.CONFIG
    assert {file.name for file in checkpoint.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "prompts.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_one_key_value_head_and_a_vocabulary_that_is_padded(tmp_path: Path) -> None:
    qwen3.build_mqa(tmp_path, lambda line: None)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_key_value_heads"], config["vocab_size"]) == (1, 1000)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.3.self_attn.k_proj.weight"].shape == (128, 256)
    assert stored["lm_head.weight"].shape == stored["model.embed_tokens.weight"].shape == (1000, 256)
    assert digest(tmp_path / "model.safetensors") == MQA_SHA256
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    assert max(tokenizer["model"]["vocab"].values()) == 999
