"""Distances from digests, against the distances of the tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from align.checkpoints.shards import shards
from align.checkpoints.table import parse, structure_of
from align.compare.estimate import estimate, joined_digest
from align.compare.metrics import measure
from align.trace.digest import channel_signs, digest_tokens
from align.trace.format import TOKEN_DIGEST, TOKEN_SQUARES
from align.trace.reader import Trace
from tests.unit.align.compare import traces

CONFIG = traces.CONFIG


def digests(whole: torch.Tensor, kind: str) -> torch.Tensor:
    flat = whole.flatten(1)
    projected, squares = digest_tokens(flat[None], channel_signs(kind, torch.arange(flat.shape[1]), 0))
    return torch.cat((projected[0], squares[0][:, None]), 1)


def test_estimates_are_near_the_truth() -> None:
    generator = torch.Generator().manual_seed(1)
    b = torch.randn(400, 6, 50, generator=generator)
    a = b + 0.02 * torch.randn(b.shape, generator=generator)
    a[123] += b[123]
    found, true = estimate(digests(a, "attn.q"), digests(b, "attn.q")), measure(a, b)
    assert found.rel_l2 == pytest.approx(true.rel_l2, rel=0.5)
    assert found.worst_token is not None and true.worst_token is not None
    assert found.worst_token.index == true.worst_token.index == 123
    assert found.worst_token.rel_l2 == pytest.approx(true.worst_token.rel_l2, rel=0.6)
    assert not found.equal and found.max_abs is None


def test_equal_digests_prove_nothing_but_are_no_distance() -> None:
    digest = digests(torch.randn(9, 40, generator=torch.Generator().manual_seed(2)), "embed")
    found = estimate(digest, digest.clone())
    assert found.rel_l2 == 0.0 and not found.equal


def test_a_zero_token_has_the_noise_of_the_others() -> None:
    b = torch.ones(9, 64)
    b[4] = 0
    a = b + 0.001
    found = estimate(digests(a, "embed"), digests(b, "embed"))
    assert found.worst_token is not None and found.worst_token.rel_l2 < 0.05


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", ["attn.k", "attn.out", "mlp.act", "mid"])
def test_digests_of_ranks_join(tmp_path: Path, tp: int, kind: str) -> None:
    """Shards add up to the whole; four ranks hold each of two key heads twice, which counts once."""
    structure, name = structure_of(CONFIG, tp), f"layers.0.{kind}"
    wholes: list[torch.Tensor] = []

    def digest(trace: Trace) -> torch.Tensor | None:
        return joined_digest(trace, 0, name)

    class Digested(Trace):
        def tensor(self, rank: int, step: int, key: str) -> torch.Tensor | None:
            if not key.endswith((TOKEN_DIGEST, TOKEN_SQUARES)):
                return super().tensor(rank, step, key)
            own = super().tensor(rank, step, key.partition("#")[0])
            assert own is not None
            axes = parse(name).kind.axes
            channels = torch.arange(wholes[0][0].numel()).reshape(wholes[0].shape[1:])
            shard = shards(structure, rank).get(kind)
            if shard is not None:
                channels = channels.narrow(axes.index(parse(name).kind.shard) - 1, shard.start, shard.count)
            projected, squares = digest_tokens(own.flatten(1)[None], channel_signs(kind, channels.reshape(-1), 0))
            return projected[0] if key.endswith(TOKEN_DIGEST) else squares[0]

    traces.write(tmp_path, tp=tp)
    trace = Digested(tmp_path)
    whole = trace.joined(0, name)
    assert whole is not None
    wholes.append(whole)
    found = digest(trace)
    assert found is not None
    torch.testing.assert_close(found, digests(whole, kind), rtol=1e-4, atol=1e-4)
