"""The smallest TP that fits: bytes of a rank against weights that are really cut into pieces."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from align.case.build import new_case
from align.ladder.memory import USABLE, Tensor, cache_bytes, share_of, smallest_fit, tensors_of, weight_bytes
from align.layout import Layout
from align.models import qwen3
from align.models.info import ModelInfo, read_info
from envs.memory import device_memory


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    qwen3.build(folder, lambda line: None)
    return read_info(folder)


def cut(info: ModelInfo, tp: int) -> int:
    """Bytes of the first rank, counted on tensors that were cut by what each projection is."""
    total = 0
    for file in info.path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in sorted(opened.keys()):
                value = opened.get_tensor(name).to(torch.bfloat16)
                if any(part in name for part in ("q_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")):
                    value = value.chunk(tp, 0)[0]
                elif any(part in name for part in ("k_proj", "v_proj")):
                    value = value.chunk(min(tp, info.kv_heads), 0)[0]
                elif any(part in name for part in ("o_proj", "down_proj")):
                    value = value.chunk(tp, 1)[0]
                total += value.numel() * value.element_size()
    return total


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_takes_what_its_pieces_take(info: ModelInfo, tp: int) -> None:
    assert weight_bytes(list(tensors_of(info.path)), tp, info.kv_heads) == cut(info, tp)


def test_what_is_not_split_is_held_whole() -> None:
    assert share_of("model.norm.weight", 4, 2) == 1
    assert share_of("model.layers.11.self_attn.q_norm.weight", 4, 2) == 1
    assert share_of("model.layers.11.self_attn.k_proj.weight", 4, 2) == 2
    assert share_of("model.layers.0.mlp.experts.7.down_proj.weight", 4, 2) == 4
    assert share_of("something.else", 4, 2) == 1


def test_dtypes_that_engines_keep_are_counted_as_they_are() -> None:
    half, whole = (weight_bytes([Tensor("a", dtype, (3, 5))], 1, 1) for dtype in ("F32", "I32"))
    assert (half, whole) == (30, 60)


def test_the_cache_of_a_rank(info: ModelInfo) -> None:
    case = new_case(info).case
    whole, half, replicated = (cache_bytes(case, info, tp) for tp in (1, info.kv_heads, 2 * info.kv_heads))
    assert whole == info.kv_heads * half and replicated == half


def test_the_smallest_that_fits(info: ModelInfo) -> None:
    case = new_case(info).case.with_layout(Layout(4))
    needs = smallest_fit(case, info, 1).needs
    assert list(needs) == [1, 2, 4] and needs[1] > needs[2] > needs[4]
    for tp, need in needs.items():
        enough = int(need / USABLE) + 1
        assert smallest_fit(case, info, enough).min_tp == tp
    assert smallest_fit(case, info, 1).min_tp is None
    assert smallest_fit(case.with_layout(Layout(2)), info, int(needs[4] / USABLE) + 1).min_tp is None


def test_the_simulated_device_says_what_it_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALIGN_SIMNPU_MEMORY_GIB", raising=False)
    assert device_memory("simnpu") == 16 << 30
    monkeypatch.setenv("ALIGN_SIMNPU_MEMORY_GIB", "2")
    assert device_memory("simnpu") == 2 << 30
    assert device_memory("ascend") is None
    monkeypatch.setenv("ALIGN_SIMNPU_MEMORY_GIB", "much")
    with pytest.raises(ValueError, match="ALIGN_SIMNPU_MEMORY_GIB"):
        device_memory("simnpu")
