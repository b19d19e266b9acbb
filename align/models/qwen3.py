"""The ``qwen3`` preset: a tiny Qwen3 whose weights are computed here, the same bytes on every machine.

The architecture is the real one (grouped-query attention, q/k norm, head_dim 128), only small. Weights come
from an integer generator and exact arithmetic, not from ``torch.randn``, whose last bits depend on the
processor.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from align.models.cache import Say
from align.models.files import write_json, write_prompts

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

#: Seed of the weights and of the default prompts; chosen so that near-ties are rare on these prompts.
SEED = 67
#: Lengths of the default prompts, in tokens.
PROMPT_LENGTHS = (1, 7, 33, 200)

BOS, EOS, PAD = 0, 1, 2
SPECIAL = ("<bos>", "<eos>", "<pad>")
VOCAB = 1024
#: Ids from here on are reserved special tokens, as real vocabularies have them.
FIRST_RESERVED = VOCAB - 27

#: Written with the keys that transformers 4 and 5 both read (``torch_dtype``, ``rope_theta``).
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
    "max_window_layers": 4,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    # No pad_token_id, as in Qwen3's own configurations. In a trained model the embedding's row of such an id is zero;
    # here it would be random, and lmdeploy 0.12.2 sets it to zero while vLLM keeps what is in the file.
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}

#: One key/value head, which every rank of tensor parallelism holds a copy of; and a vocabulary that engines pad.
MQA_CONFIG: dict[str, Any] = {**CONFIG, "num_key_value_heads": 1, "vocab_size": 1000}

GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": BOS,
    "do_sample": False,
    "eos_token_id": EOS,
}

CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def shapes(config: Mapping[str, Any] = CONFIG) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all parameters, as Qwen3ForCausalLM has them."""
    hidden, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    vocab = config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (q_size, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv_size, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv_size, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, q_size)
        yield f"{layer}.self_attn.q_norm.weight", (dim,)
        yield f"{layer}.self_attn.k_norm.weight", (dim,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (inter, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inter, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inter)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _raw(seed: int, name: str, count: int) -> NDArray[np.uint64]:
    """``count`` random 64-bit words; the stream of a PCG64 is fixed by its definition."""
    import numpy as np

    generator = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
    return np.asarray(generator.random_raw(count), dtype="<u8")


def bell(seed: int, name: str, count: int) -> NDArray[np.float32]:
    """``count`` values of mean 0 and variance 1, bell-shaped: sums of four 16-bit uniforms (Irwin-Hall),
    exact.
    """
    import numpy as np

    quarters = _raw(seed, name, count).view("<u2").reshape(count, 4).astype(np.int64)
    centred = 2 * quarters.sum(axis=1) - 4 * 65535
    # Each quarter has variance (65536² - 1) / 12, so `centred` has 4 * 4 * that.
    scale = np.float32(1.0 / sqrt(16 * (65536**2 - 1) / 12))
    return np.asarray(centred.astype(np.float32) * scale, dtype=np.float32)


Shapes = Callable[[Mapping[str, Any]], "Iterator[tuple[str, tuple[int, ...]]]"]


#: About which value the weights of a norm lie.
Centre = Callable[[str], float]


def weights(
    seed: int = SEED,
    config: Mapping[str, Any] = CONFIG,
    parameters: Shapes = shapes,
    centre: Centre = lambda name: 1.0,
) -> dict[str, torch.Tensor]:
    """All parameters in bfloat16; greedy output varies and the logits' deviation is about 2."""
    import torch

    tensors = {}
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    for name, shape in parameters(config):
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        values = torch.from_numpy(bell(seed, name, count)).reshape(shape)
        if name.endswith(".bias"):
            values = 0.1 * values
        elif len(shape) == 1:
            values = centre(name) + 0.1 * values
        elif name == head:
            values = values * (2.0 / sqrt(shape[1]))
        elif name != "model.embed_tokens.weight":
            values = values * (1.2 / sqrt(shape[1]))
        tensors[name] = values.to(torch.bfloat16).contiguous()
    return tensors


def default_prompts(seed: int = SEED) -> tuple[tuple[int, ...], ...]:
    """Ids of the default prompts: seeded, never special, no prompt the beginning of another."""
    span = FIRST_RESERVED - len(SPECIAL)
    return tuple(
        tuple(len(SPECIAL) + int(word) % span for word in _raw(seed, f"prompt.{length}", length))
        for length in PROMPT_LENGTHS
    )


def _vocabulary(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Byte-level vocabulary (any text can be written) and its merges: letter pairs, then a space and a
    letter.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    merges = [(first, second) for first in letters for second in letters]
    merges += [("Ġ", letter) for letter in letters]
    merges += [("Ġ", letter.upper()) for letter in letters]
    merges += [("Ġ", str(digit)) for digit in range(10)]
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(first + second for first, second in merges)]
    assert len(tokens) == FIRST_RESERVED, len(tokens)
    tokens += [f"<reserved_{index}>" for index in range(size - len(tokens))]
    return {token: index for index, token in enumerate(tokens)}, merges


def write_tokenizer(folder: Path, size: int = VOCAB) -> None:
    """Write tokenizer.json and tokenizer_config.json, of ``size`` tokens. Texts get no BOS; the chat template writes
    one.
    """
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )

    vocab, merges = _vocabulary(size)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, index in vocab.items() if index < len(SPECIAL) or index >= FIRST_RESERVED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "add_bos_token": False,
        "bos_token": SPECIAL[BOS],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL[EOS],
        "model_max_length": CONFIG["max_position_embeddings"],
        "pad_token": SPECIAL[PAD],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", settings)


def build(
    folder: Path,
    say: Say,
    seed: int = SEED,
    config: Mapping[str, Any] = CONFIG,
    parameters: Shapes = shapes,
    centre: Centre = lambda name: 1.0,
) -> None:
    """Write the whole checkpoint into an existing empty ``folder``. Takes about a second, 8 MB.

    ``parameters`` gives names and shapes for a configuration, ``centre`` what a norm's weights lie about.
    """
    from safetensors.torch import save

    write_json(folder / "config.json", dict(config))
    write_json(folder / "generation_config.json", GENERATION_CONFIG)
    write_tokenizer(folder, config["vocab_size"])
    write_prompts(folder, [(ids, None) for ids in default_prompts(seed)])
    say("computing the weights")
    (folder / "model.safetensors").write_bytes(
        save(weights(seed, config, parameters, centre), metadata={"format": "pt"})
    )


def build_mqa(folder: Path, say: Say) -> None:
    """The same with :data:`MQA_CONFIG`."""
    build(folder, say, config=MQA_CONFIG)
