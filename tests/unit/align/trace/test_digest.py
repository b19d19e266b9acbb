"""Random projections: they add up, they see what moved, and they estimate a distance without bias."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from align.trace.digest import channel_signs, digest_channels, digest_tokens, estimate_rel_l2, token_signs

Tensor = torch.Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_signs_are_the_same_on_every_machine() -> None:
    """Recomputed with Python's own integers, from the published constants of SplitMix64."""
    mask = (1 << 64) - 1

    def mixed(counter: int) -> int:
        z = (counter * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    def start(text: str, seed: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{seed}\0{text}".encode()).digest()[:8], "little")

    found = channel_signs("attn.q", torch.tensor([0, 5, 151935]), 3)
    for row, channel in zip(found.tolist(), (0, 5, 151935), strict=True):
        bits = mixed(mixed(channel) ^ start("attn.q", 3))
        assert row == [1.0 if bits >> i & 1 else -1.0 for i in range(8)]
    rows = token_signs(["r0", "r1"], [4, 4], [0, 2], 3)
    for row, name, again in zip(rows.tolist(), ("r0", "r1"), (0, 2), strict=True):
        bits = mixed((mixed(mixed(4) ^ start(name, 3)) + again) & mask)
        assert row == [1.0 if bits >> i & 1 else -1.0 for i in range(4)]
    # SplitMix64 of state 0 begins with this number, see its reference implementation.
    assert mixed(0) == 0xE220A8397B1DCDAF


def test_signs_are_balanced_and_independent() -> None:
    signs = channel_signs("mlp.gate", torch.arange(20000), 0).double()
    assert signs.abs().eq(1).all()
    assert float(signs.mean(0).abs().max()) < 5 / np.sqrt(20000)
    products = signs.T @ signs / 20000 - torch.eye(8, dtype=torch.float64)
    assert float(products.abs().max()) < 5 / np.sqrt(20000)
    others = (channel_signs("mlp.up", torch.arange(20000), 0), channel_signs("mlp.gate", torch.arange(20000), 1))
    for other in others:
        assert float((signs * other.double()).mean(0).abs().max()) < 5 / np.sqrt(20000)


def test_shards_and_partial_sums_add_up() -> None:
    x = normal(2, 3, 24)
    whole, squares = digest_tokens(x, channel_signs("attn.q", torch.arange(24), 0))
    parts = [
        digest_tokens(x[..., start : start + 8], channel_signs("attn.q", torch.arange(start, start + 8), 0))
        for start in (0, 8, 16)
    ]
    torch.testing.assert_close(sum(part for part, _ in parts), whole)
    torch.testing.assert_close(sum(square for _, square in parts), squares)
    signs = channel_signs("attn.o", torch.arange(24), 0)
    one, two = normal(2, 3, 24, seed=1), normal(2, 3, 24, seed=2)
    torch.testing.assert_close(
        digest_tokens(one, signs)[0] + digest_tokens(two, signs)[0], digest_tokens(one + two, signs)[0]
    )


def test_steps_add_up_whatever_the_order_of_their_rows() -> None:
    x = normal(2, 6, 5)
    names, positions = ["a", "a", "a", "b", "b", "c"], [0, 1, 2, 0, 1, 7]
    signs = token_signs(names, positions, [0] * 6, 0)
    whole, squares = digest_channels(x, signs)
    order = [5, 3, 0, 4, 1, 2]
    shuffled = token_signs([names[i] for i in order], [positions[i] for i in order], [0] * 6, 0)
    first, second = (digest_channels(x[:, order[part]], shuffled[part]) for part in (slice(0, 2), slice(2, 6)))
    torch.testing.assert_close(first[0] + second[0], whole)
    torch.testing.assert_close(first[1] + second[1], squares)
    assert token_signs([], [], [], 0).shape == (0, 4)


def test_rows_and_channels_that_changed_places_are_seen() -> None:
    x = normal(1, 64, 32)
    signs = token_signs(["r"] * 64, list(range(64)), [0] * 64, 0)
    right, squares = digest_channels(x, signs)
    swapped = x.clone()
    swapped[:, [10, 11]] = x[:, [11, 10]]
    wrong, same = digest_channels(swapped, signs)
    torch.testing.assert_close(squares, same)  # sums of squares cannot see it
    assert float((right - wrong).abs().max()) > 0.5
    channels = channel_signs("attn.k", torch.arange(32), 0)
    rolled = digest_tokens(x.roll(1, -1), channels)[0]
    assert float(estimate_rel_l2(rolled, *digest_tokens(x, channels)).median()) > 0.5


def test_bfloat16_is_projected_in_float32() -> None:
    x = normal(1, 2, 300).bfloat16()
    signs = channel_signs("embed", torch.arange(300), 0)
    found, squares = digest_tokens(x, signs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double() @ signs.double(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(squares.double(), x.double().square().sum(-1), rtol=1e-5, atol=0)


def test_the_estimate_is_unbiased_and_as_wide_as_it_says() -> None:
    a, b = normal(400, seed=1), normal(400, seed=2)
    true = float((a - b).square().sum() / b.square().sum())
    squares = []
    for seed in range(2000):
        signs = channel_signs("attn.out", torch.arange(400), seed)
        tok_a, _ = digest_tokens(a[None, None], signs)
        tok_b, size = digest_tokens(b[None, None], signs)
        squares.append(float(estimate_rel_l2(tok_a, tok_b, size)) ** 2 / true)
    found = np.array(squares)
    assert abs(found.mean() - 1) < 5 * 0.5 / np.sqrt(2000)
    assert 0.45 < found.std() < 0.55
    assert np.mean(found < 1 / 16) < 5e-3


def test_the_estimate_of_nothing() -> None:
    zeros, some = torch.zeros(1, 8), torch.ones(1, 8)
    assert estimate_rel_l2(zeros, zeros, torch.zeros(1)).tolist() == [0.0]
    assert estimate_rel_l2(some, zeros, torch.zeros(1)).tolist() == [torch.inf]
