"""Kernels that send tokens to experts, wrapped so that each rank's call is recorded, over two real ranks of gloo."""

from __future__ import annotations

import pytest
import torch

from align.collectives.record.files import FOLDER, Records, read_records
from align.collectives.record.types import CollectiveCall
from align.collectives.relations import judge_call, together
from tests.unit.adapters.probe.ranks import run_ranks


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Records:
    directory = tmp_path_factory.mktemp("experts")
    ended = run_ranks("experts", directory)
    assert [one.code for one in ended] == [0, 0], ended
    records = read_records(directory / FOLDER)
    assert records is not None
    return records


def of(records: Records, rank: int) -> list[CollectiveCall]:
    return [call for call in records.calls if call.rank == rank and call.operation in ("dispatch", "combine")]


def test_each_kernel_is_one_call_of_the_experts(recorded: Records) -> None:
    for rank in (0, 1):
        sent, home = of(recorded, rank)
        assert (sent.operation, home.operation) == ("dispatch", "combine")
        assert sent.where == home.where == "layers.1.moe.routed"
        assert sent.about["moe_expert_num"] == 4 and sent.about["masked"] is False
        assert len(sent.tensors["out.0"]) == int(sent.tensors["out.2"][-1]), "rows that were received, and no others"


def test_what_the_kernels_did_holds(recorded: Records) -> None:
    calls = {rank: of(recorded, rank) for rank in (0, 1)}
    judged = [judge_call(key, found) for key, found in together(calls).items()]
    assert [(one.operation, one.verdict) for one in judged] == [("dispatch", "right"), ("combine", "right")]


def test_tensors_are_copies(recorded: Records) -> None:
    sent, _ = of(recorded, 0)
    assert torch.equal(sent.tensors["in.0"], torch.arange(8.0).reshape(2, 4).bfloat16())
