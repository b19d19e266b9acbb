"""Values on the npu device: dtypes, shapes, modes, files, threads, operators; run by test_device.py."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_npu._sim import device, memory, numerics

from tests.unit.envs.simnpu.operators import make
from tests.unit.envs.simnpu.session import refused

Tensor = torch.Tensor
npu: Any = vars(torch)["npu"]

SUPPORTED = (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


@contextlib.contextmanager
def selected(index: int) -> Iterator[None]:
    before = npu.current_device()
    npu.set_device(index)
    try:
        yield
    finally:
        npu.set_device(before)


# ----------------------------------------------------------------------------------------------- numbers, dtypes


def check_python_numbers_do_not_promote_halves() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.ones(3, dtype=dtype).to("npu")
        for result in (x * 2.0, 2.0 * x, x + 1, 1 - x, x / 3, x**2, x.clamp(max=0.3), x % 2):
            assert result.dtype == dtype
    ints = torch.arange(20, dtype=torch.int32).to("npu")
    assert (ints % 16).tolist() == [*range(16), 0, 1, 2, 3]
    assert (ints % 16).dtype == torch.int32
    assert (ints * 2.5).dtype == torch.float32
    assert (ints / 2).dtype == torch.float32
    assert (2.5 - ints).dtype == torch.float32
    assert (ints + True).dtype == torch.int32
    assert (torch.ones(3).to("npu") * 1j).dtype == torch.complex64
    assert (ints >= 16).sum().item() == 4


def check_a_zero_dimensional_tensor_promotes_as_on_the_host() -> None:
    for left, right in ((torch.float16, torch.float32), (torch.int32, torch.int64), (torch.int8, torch.float64)):
        x, number = torch.ones(3, dtype=left), torch.ones((), dtype=right)
        assert (x.to("npu") + number.to("npu")).dtype == (x + number).dtype


def check_every_dtype_goes_and_comes_back() -> None:
    for dtype in SUPPORTED:
        host = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int64).to(dtype)
        there = host.to("npu")
        assert there.dtype == dtype
        assert torch.equal(there.cpu(), host), dtype
        assert torch.zeros(3, dtype=dtype, device="npu").cpu().tolist() == torch.zeros(3, dtype=dtype).tolist()
        assert torch.equal(there.to(torch.float32 if not dtype.is_complex else torch.complex64).cpu(), host.to(
            torch.float32 if not dtype.is_complex else torch.complex64)), dtype  # fmt: skip
        assert there[1:4].clone().cpu().tolist() == host[1:4].tolist(), dtype


def check_other_dtypes_are_refused_by_name() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        with refused(RuntimeError, f"tensors of {dtype} are not simulated"):
            torch.zeros(3).to(dtype).to("npu")
        with refused(RuntimeError, f"tensors of {dtype} are not simulated"):
            torch.zeros(3).to("npu").to(dtype)


# ------------------------------------------------------------------------------------------------ shapes, strides


def check_strides_of_dense_tensors_are_kept() -> None:
    host = torch.randn(2, 3, 4, 5)
    for layout in (host.permute(3, 1, 0, 2), host.to(memory_format=torch.channels_last), host.mT):
        there = layout.to("npu")
        assert there.stride() == layout.stride()
        assert torch.equal(there.cpu(), layout)
        assert there.cpu().stride() == layout.stride()
        assert torch.equal(there.contiguous().cpu(), layout)
        assert torch.equal(there.clone().cpu(), layout)


def check_tensors_with_gaps_or_overlaps_are_packed() -> None:
    host = torch.arange(24.0).view(4, 6)
    for strided in (
        host[:, ::2],
        host[1::2, 1:4],
        host[:1].expand(5, 6),
        host.as_strided((3, 4), (1, 1)),
        host.t()[2:],
    ):
        there = strided.to("npu")
        assert there.stride() == strided.clone().stride()
        assert torch.equal(there.cpu(), strided)
        assert there.untyped_storage().nbytes() >= strided.numel() * 4


def check_copies_into_strided_targets() -> None:
    for source, target in ((torch.randn(3, 4), torch.zeros(4, 3).t()), (torch.randn(3, 1), torch.zeros(3, 8)[:, ::2])):
        base = target.clone()
        there = torch.zeros(6, 8).to("npu")[: target.shape[0], : 2 * target.shape[1] : 2]
        there.copy_(source.to("npu"))
        base.copy_(source)
        assert torch.equal(there.cpu(), base)
        on_host = torch.zeros(6, 8)[: target.shape[0], : 2 * target.shape[1] : 2]
        on_host.copy_(source.to("npu"))
        assert torch.equal(on_host, base)
    half = torch.zeros(3, dtype=torch.float16).to("npu")
    half.copy_(torch.tensor([1.5, 2.5, 3.5], dtype=torch.float64))
    assert half.tolist() == [1.5, 2.5, 3.5]


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.lists(st.integers(0, 4), min_size=0, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.randoms(use_true_random=False),
)
def random_shape(shape: list[int], dtype: torch.dtype, random: Any) -> None:
    host = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    order = list(range(len(shape)))
    random.shuffle(order)
    strided = host.permute(order)[tuple(slice(None, None, random.choice([1, 2])) for _ in order)]
    there = strided.to("npu")
    assert there.shape == strided.shape
    assert torch.equal(there.cpu(), strided)
    assert torch.equal(there.contiguous().cpu(), strided)
    assert torch.equal(there.flip(0).cpu() if shape else there.cpu(), strided.flip(0) if shape else strided)


def check_any_shape_and_stride() -> None:
    random_shape()


def check_zero_dimensional_and_empty_tensors() -> None:
    number = torch.tensor(3.5).to("npu")
    assert number.shape == ()
    assert number.item() == 3.5
    assert float(number) == 3.5
    assert bool(number > 3)
    assert number.view(1).tolist() == [3.5]
    nothing = torch.empty(0, 4).to("npu")
    assert nothing.shape == (0, 4)
    assert nothing.cpu().shape == (0, 4)
    assert (nothing + 1).shape == (0, 4)
    assert nothing.sum().item() == 0
    assert nothing[:, 1:3].shape == (0, 2)
    assert torch.cat([nothing, torch.ones(1, 4).to("npu")]).shape == (1, 4)
    assert torch.zeros(0, device="npu").tolist() == []
    nothing.copy_(torch.empty(0, 4))
    assert nothing.clone().shape == (0, 4)


def check_twelve_dimensions_at_most() -> None:
    assert torch.ones([1] * 12).to("npu").shape == (1,) * 12
    with refused(RuntimeError, "at most 12"):
        torch.ones([1] * 13).to("npu")


# --------------------------------------------------------------------------------------------- modes and modules


def check_inference_mode() -> None:
    base = torch.ones(4).to("npu")
    with torch.inference_mode():
        x = torch.arange(4.0, device="npu")
        y = x + base
        assert y.is_inference()
        y[1:].mul_(2)
        y.view(2, 2)[0] = 7
        x.copy_(y)
        out = torch.empty(0, device="npu")
        torch.add(x, y, out=out)
        linear = torch.nn.functional.linear(y, torch.ones(2, 4, device="npu"))
    assert y.cpu().tolist() == [7.0, 7.0, 6.0, 8.0]
    assert out.cpu().tolist() == [14.0, 14.0, 12.0, 16.0]
    assert linear.cpu().tolist() == [28.0, 28.0]


def check_gradients() -> None:
    w = torch.randn(3, 4)
    there, host = w.to("npu").requires_grad_(), w.clone().requires_grad_()
    for parameter in (there, host):
        ((parameter * 2).tanh() @ torch.ones(4, 1, device=parameter.device)).sum().backward()
    assert there.grad is not None and host.grad is not None
    assert there.grad.device.type == "npu"
    assert torch.equal(there.grad.cpu(), host.grad)


def check_modules_move_and_compute() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Embedding(10, 8), torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16)
    )
    module.register_buffer("steps", torch.arange(3))
    ids = torch.tensor([[1, 2, 9]])
    with torch.no_grad():
        expected = module(ids)
        moved = copy.deepcopy(module).to("npu")
        assert {p.device.type for p in moved.parameters()} == {"npu"}
        assert moved.get_buffer("steps").device.type == "npu"
        # The layer norm is made of several operators on the device, of one on the CPU.
        assert torch.allclose(moved(ids.to("npu")).cpu(), expected, atol=1e-6)
        half = moved.to(torch.bfloat16)
        assert half(ids.to("npu")).dtype == torch.bfloat16
        assert torch.allclose(module.to("npu")(ids.to("npu")).cpu(), expected, atol=1e-6)
        assert {p.device.type for p in module.cpu().parameters()} == {"cpu"}
        torch.nn.Linear(8, 16, device="npu").load_state_dict(torch.nn.Linear(8, 16).state_dict())
    with torch.device("meta"):
        empty = torch.nn.Linear(2, 2)
    assert empty.to_empty(device="npu").weight.device.type == "npu"


def check_device_as_a_context() -> None:
    with torch.device("npu"):
        made = [
            torch.zeros(2), torch.tensor([1.0]), torch.arange(3), torch.empty(2, 2), torch.ones(1), torch.full((1,), 2),
            torch.randn(3), torch.nn.Linear(2, 2).weight, torch.eye(2), torch.linspace(0, 1, 3),
            torch.zeros(2, pin_memory=True),
        ]  # fmt: skip
        assert torch.zeros(2, device="cpu").device.type == "cpu"
    assert {tensor.device.type for tensor in made} == {"npu"}
    assert torch.zeros(2).device.type == "cpu"
    torch.set_default_device("npu")
    try:
        assert torch.zeros(2).device.type == "npu"
    finally:
        torch.set_default_device(None)


# ----------------------------------------------------------------------------------------------- serialisation


def check_pickling() -> None:
    x = torch.arange(6.0).view(2, 3).to("npu")
    back = pickle.loads(pickle.dumps(x.t()))
    assert back.device == x.device
    assert torch.equal(back.cpu(), x.cpu().t())
    back.zero_()
    assert x.sum().item() == 15


def check_save_and_load() -> None:
    x = torch.arange(6.0).to("npu")
    file = io.BytesIO()
    torch.save({"all": x, "part": x[2:4], "half": x.bfloat16(), "host": x.cpu()}, file)
    for place, expected in ((None, "npu:0"), ("cpu", "cpu"), ("npu:3", "npu:3"), (torch.device("npu:1"), "npu:1")):
        file.seek(0)
        loaded = torch.load(file, map_location=place, weights_only=True)
        assert str(loaded["all"].device) == expected
        assert loaded["all"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert loaded["half"].dtype == torch.bfloat16
        assert loaded["half"].tolist() == loaded["all"].tolist()
        loaded["all"].zero_()
        assert loaded["part"].tolist() == [0.0, 0.0], "tensors that shared memory share it again"
    assert x.sum().item() == 15


def check_deep_copies() -> None:
    x = torch.arange(4.0).to("npu")
    both = copy.deepcopy([x, x[1:]])
    assert both[0].device == x.device
    both[0].zero_()
    assert both[1].tolist() == [0.0, 0.0, 0.0], "tensors that shared memory share it again"
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert copy.copy(x) is not x
    empty = copy.deepcopy(torch.empty(0).to("npu"))
    assert empty.shape == (0,)


# ------------------------------------------------------------------------------------------- current device


def check_the_current_device_takes_new_tensors() -> None:
    host = torch.ones(2)
    whatever: Any = host
    with selected(1):
        for tensor in (
            host.to("npu"), whatever.npu(), torch.zeros(2, device="npu"), torch.tensor([1], device="npu"),
            torch.arange(3, device="npu"), host.to(torch.device("npu")), torch.nn.Linear(2, 2).to("npu").weight,
            host.to("npu") + 1,
        ):  # fmt: skip
            assert str(tensor.device) == "npu:1"
        assert str(host.to("npu:2").device) == "npu:2"
        assert str((host.to("npu:2") * 2).device) == "npu:2"
    assert str(host.to("npu").device) == "npu:0"
    assert str(whatever.npu(2).device) == "npu:2"
    assert host.to("npu:2").to("npu:1").device.index == 1


def check_devices_that_do_not_exist_are_refused() -> None:
    for make_one in (
        lambda: torch.ones(2).to("npu:99"), lambda: torch.empty(2, device="npu:8"), lambda: npu.set_device(8),
        lambda: torch.ones(2).to("npu").to("npu:64"), lambda: npu.set_device(-1),
    ):  # fmt: skip
        with refused(RuntimeError, "invalid device index"):
            make_one()
    assert npu.current_device() == 0


# ------------------------------------------------------------------------------------------- threads and memory


def check_threads() -> None:
    base = torch.randn(64, 64)
    expected = (base @ base).softmax(-1)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            x = base.to("npu")
            if not torch.equal((x @ x).softmax(-1).cpu(), expected):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def check_memory_is_freed() -> None:
    """2 GB in all, 32 MB at a time: resident memory stays flat."""
    block = 8 << 20
    torch.full((block,), 1.0, device="npu")
    before = memory.allocated_bytes()
    highest = 0
    for value in range(64):
        x = torch.full((block,), float(value), device="npu")
        x[::2].add_(1)
        highest = max(highest, memory.allocated_bytes())
        del x
    assert highest - before < 150 << 20
    assert memory.allocated_bytes() - before < 16 << 20


def check_memory_of_views_and_results_is_freed() -> None:
    x = torch.randn(256, 256, device="npu")
    before = memory.allocated_bytes()
    for _ in range(400):
        y = (x * 2).t()[1:].contiguous().view(-1)[5:]
        torch.add(y, 1, out=torch.empty(0, device="npu"))
    assert memory.allocated_bytes() - before < 16 << 20


def check_fallback_calls_are_counted() -> None:
    before = device.fallback_calls["aten.sigmoid.out"] + device.fallback_calls["aten.sigmoid.default"]
    torch.ones(3).to("npu").sigmoid()
    assert device.fallback_calls["aten.sigmoid.out"] + device.fallback_calls["aten.sigmoid.default"] == before + 1


def check_random_numbers_repeat() -> None:
    torch.manual_seed(7)
    first = torch.randn(5, device="npu").cpu()
    torch.manual_seed(7)
    assert torch.equal(torch.randn(5, device="npu").cpu(), first)
    assert torch.randint(0, 9, (100,), device="npu").max().item() < 9
    assert sorted(torch.randperm(9, device="npu").tolist()) == list(range(9))
    assert 0 < torch.rand(1000, device="npu").mean().item() < 1
    x = torch.empty(1000, device="npu").normal_(3, 0.1)
    assert abs(x.mean().item() - 3) < 0.1


def check_matrix_products_by_numerics() -> None:
    left, right = make("b 5x64", 1), make("b 64x6", 2)
    exact = (left.double() @ right.double()).to(torch.bfloat16)
    rounded = (left.float() @ right.float()).to(torch.bfloat16)
    previous = numerics.set_numerics("fp32-internal")
    try:
        assert torch.equal((left.to("npu") @ right.to("npu")).cpu(), rounded)
        assert (left.to("npu") @ right.to("npu")).cpu().sub(exact).abs().max() <= exact.abs().max() * 2**-7
        numerics.set_numerics("native")
        assert torch.equal((left.to("npu") @ right.to("npu")).cpu(), left @ right)
    finally:
        numerics.set_numerics(previous)
