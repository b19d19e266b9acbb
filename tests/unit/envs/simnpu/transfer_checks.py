"""Code written for cuda, after importing transfer_to_npu; run by test_transfer.py."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from torch_npu.contrib import transfer_to_npu

from tests.unit.envs.simnpu.session import refused

npu: Any = torch_npu.npu


def check_cuda_strings_mean_npu() -> None:
    for tensor in (
        torch.zeros(2, device="cuda"), torch.tensor([1], device="cuda:0"), torch.arange(3, device="cuda"),
        torch.randn(2, device="cuda"), torch.full((2,), 1, device="cuda"), torch.empty((2, 2), device="cuda"),
        torch.ones(2).to("cuda"), torch.ones(2).to(device="cuda"), torch.ones(2).to("cuda", torch.float16),
        torch.ones_like(torch.ones(2), device="cuda"), torch.ones(2).new_zeros(3, device="cuda"),
        torch.as_tensor([1, 2], device="cuda"), torch.eye(2, device="cuda"),
    ):  # fmt: skip
        assert str(tensor.device) == "npu:0"
    assert str(torch.zeros(2, device="cuda:3").device) == "npu:3"
    assert str(torch.ones(2).to("cuda:2").device) == "npu:2"


def check_cuda_devices_mean_npu() -> None:
    assert str(torch.zeros(2, device=torch.device("cuda")).device) == "npu:0"
    assert str(torch.ones(2).to(torch.device("cuda", 1)).device) == "npu:1"
    assert str(torch.ones(2).to(torch.device("cuda:1"), non_blocking=True).device) == "npu:1"
    there = torch.ones(2).to("npu")
    assert there.to("cuda") is there, "already there"


def check_other_devices_stay() -> None:
    assert torch.zeros(2, device="cpu").device.type == "cpu"
    assert torch.zeros(2).device.type == "cpu"
    assert torch.ones(2, device="npu").to("cpu").device.type == "cpu"
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(2).to(torch.float16).dtype == torch.float16
    assert torch.tensor(["cuda" == "cuda"]).item()


def check_the_current_device_is_meant() -> None:
    npu.set_device(2)
    try:
        assert str(torch.zeros(2, device="cuda").device) == "npu:2"
        assert str(torch.ones(2).cuda().device) == "npu:2"
    finally:
        npu.set_device(0)


def check_tensor_cuda() -> None:
    assert str(torch.ones(2).cuda().device) == "npu:0"
    assert str(torch.ones(2).cuda(1).device) == "npu:1"
    assert torch.ones(2).cuda().tolist() == [1.0, 1.0]


def check_module_cuda() -> None:
    module = torch.nn.Linear(2, 3)
    expected = module(torch.ones(1, 2)).detach()
    assert module.cuda().weight.device.type == "npu"
    assert torch.equal(module(torch.ones(1, 2, device="cuda")).detach().cpu(), expected)
    assert module.to("cuda:1").weight.device.index == 1
    assert module.cpu().weight.device.type == "cpu"
    with torch.device("meta"):
        empty = torch.nn.Linear(2, 2)
    assert empty.to_empty(device="cuda").weight.device.type == "npu"


def check_torch_cuda_answers_as_npu() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == npu.device_count()
    torch.cuda.set_device(1)
    assert npu.current_device() == torch.cuda.current_device() == 1
    torch.cuda.set_device("cuda:0")
    assert npu.current_device() == 0
    with torch.cuda.device(2):
        assert npu.current_device() == 2
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.current_stream() is npu.current_stream()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert npu.current_stream() is stream
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    assert torch.cuda.get_device_name() == npu.get_device_name()
    assert torch.cuda.mem_get_info() == npu.mem_get_info()


def check_cuda_graphs_are_refused() -> None:
    with refused(RuntimeError, "eager mode"):
        torch.cuda.CUDAGraph()


def check_load_with_map_location() -> None:
    file = io.BytesIO()
    torch.save(torch.arange(3), file)
    file.seek(0)
    loaded = torch.load(file, map_location="cuda", weights_only=True)
    assert loaded.device.type == "npu"
    assert loaded.tolist() == [0, 1, 2]


def check_default_device() -> None:
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).device.type == "npu"
    finally:
        torch.set_default_device(None)


def check_wrapped_functions_keep_their_names() -> None:
    for name in ("zeros", "empty", "load", "randn"):
        assert getattr(torch, name).__name__ == name
    for name in transfer_to_npu._TENSOR:
        assert getattr(torch.Tensor, name).__name__ == name


def check_nccl_means_hccl() -> None:
    store = os.environ["STORE"]
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    try:
        assert dist.get_backend() == "hccl"
        for group in (dist.new_group([0], backend="nccl"), dist.new_group([0])):
            assert dist.get_backend(group) == "hccl"
        beside = dist.new_group([0], backend="gloo")
        assert dist.get_backend(beside) == "gloo"
        x = torch.ones(3, device="cuda")
        dist.all_reduce(x)
        assert x.tolist() == [1.0] * 3
    finally:
        dist.destroy_process_group()


def check_nccl_as_a_keyword() -> None:
    dist.init_process_group(backend="nccl", init_method=os.environ["STORE"] + "2", rank=0, world_size=1)
    try:
        assert dist.get_backend() == "hccl"
    finally:
        dist.destroy_process_group()
