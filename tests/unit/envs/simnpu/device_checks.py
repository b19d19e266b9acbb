"""The npu device itself; run by test_device.py through session.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch_npu._sim import memory, numerics

from tests.unit.envs.simnpu.operators import make
from tests.unit.envs.simnpu.session import refused

Tensor = torch.Tensor
npu: Any = vars(torch)["npu"]

SUPPORTED = (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


def same(ours: Any, theirs: Any) -> bool:
    """Bit-equal, with NaN equal to NaN, also inside of tuples."""
    if isinstance(theirs, (tuple, list)):
        return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    if not isinstance(theirs, Tensor):
        return bool(ours == theirs)
    assert ours.device.type == "npu", "the result left the device"
    host = ours.cpu()
    if host.dtype != theirs.dtype or host.shape != theirs.shape:
        return False
    return torch.equal(host.nan_to_num(1e30), theirs.nan_to_num(1e30)) and torch.equal(host != host, theirs != theirs)


@contextlib.contextmanager
def selected(index: int) -> Iterator[None]:
    before = npu.current_device()
    npu.set_device(index)
    try:
        yield
    finally:
        npu.set_device(before)


# ---------------------------------------------------------------------------------------------------- identity


def check_identity() -> None:
    x = torch.ones(3).to("npu")
    assert x.device.type == "npu"
    assert x.device.index == 0
    assert str(x.device) == "npu:0"
    assert not x.is_cpu
    assert (x + x).device == x.device
    assert x.cpu().device.type == "cpu"
    assert repr(x) == "tensor([1., 1., 1.], device='npu:0')"
    assert memory.is_device(x)
    assert not memory.is_device(x.cpu())


def check_numpy_needs_a_copy_to_the_host() -> None:
    x = torch.ones(3).to("npu")
    with refused(TypeError, "copy the tensor to host memory first"):
        x.numpy()
    assert np.array_equal(x.cpu().numpy(), np.ones(3, dtype=np.float32))
    assert x.tolist() == [1.0, 1.0, 1.0]


def check_copies_between_host_and_device_never_alias() -> None:
    host = torch.arange(6.0)
    there = host.to("npu")
    host[0] = 99
    assert there[0].item() == 0
    back = there.cpu()
    there[1] = 77
    assert back[1].item() == 1
    array = np.arange(4.0)
    from_array = torch.from_numpy(array).to("npu")
    array[0] = 5
    assert from_array[0].item() == 0
    target = torch.empty(6, device="npu")
    target.copy_(host)
    host[2] = 66
    assert target[2].item() == 2
    assert there.to("npu", copy=True).data_ptr() != there.data_ptr()
    assert there.to("npu:0") is there
    assert there.to("npu", torch.float32) is there
    assert there.clone().data_ptr() != there.data_ptr()


def check_non_blocking_copies_are_complete() -> None:
    host = torch.randn(1000)
    there = host.to("npu", non_blocking=True)
    assert torch.equal(there.to("cpu", non_blocking=True), host)
    assert torch.equal(torch.empty(1000).copy_(there, non_blocking=True), host)


# ------------------------------------------------------------------------------------------------------- views

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: x[1:, ::2],
    "select": lambda x: x[2],
    "transpose": lambda x: x.t(),
    "permute": lambda x: x.permute(1, 0),
    "view": lambda x: x.view(2, 12),
    "reshape": lambda x: x.reshape(-1),
    "flatten": lambda x: x.flatten(),
    "narrow": lambda x: x.narrow(1, 2, 3),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x.view(1, 4, 6).squeeze(0),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "split": lambda x: x.split(2)[1],
    "chunk": lambda x: x.chunk(3, 1)[2],
    "unbind": lambda x: x.unbind(1)[4],
    "detach": lambda x: x.detach(),
    "as_strided": lambda x: x.as_strided((3, 2), (6, 2), 1),
    "other dtype": lambda x: x.view(torch.int32),
    "view_as": lambda x: x.view_as(torch.empty(24)),
    "alias": lambda x: torch.ops.aten.alias(x),
    "complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)),
    "imaginary part": lambda x: torch.view_as_complex(x.view(4, 3, 2)).imag,
    "movedim": lambda x: x.movedim(0, 1),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
}


def check_views_share_the_devices_memory() -> None:
    for name, view in VIEWS.items():
        host = torch.arange(1.0, 25.0).view(4, 6)
        there = host.to("npu")
        view(host).zero_()
        seen = view(there)
        assert seen.device == there.device, name
        seen.zero_()
        assert torch.equal(there.cpu(), host), name
        assert seen.untyped_storage().data_ptr() == there.untyped_storage().data_ptr(), name


def check_expanded_rows_see_writes_to_their_origin() -> None:
    x = torch.ones(1, 3).to("npu")
    rows = x.expand(4, 3)
    x.fill_(5)
    assert rows.cpu().tolist() == [[5.0] * 3] * 4


def check_a_host_view_shares_the_memory() -> None:
    x = torch.arange(12).view(3, 4).to("npu")
    memory.host_view(x.t()[1:])[0, 0] = 50
    assert x[0, 1].item() == 50


def check_a_view_keeps_the_memory_of_a_dropped_base() -> None:
    view = torch.arange(100_000).to("npu")[10:20]
    torch.full((100_000,), 7).to("npu")
    assert view.tolist() == list(range(10, 20))


def check_pending_conjugations_and_negations() -> None:
    host = torch.randn(5, dtype=torch.complex64)
    there = host.to("npu")
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda z: z.conj(),
        lambda z: z.conj() * z,
        lambda z: z.conj().imag,
        lambda z: z.conj().imag + 1,
        lambda z: z.view(5, 1).mH,
    ]
    for function in functions:
        assert torch.equal(function(there).cpu(), function(host).resolve_conj().resolve_neg())
    there.conj().copy_(host.to("npu"))
    assert torch.equal(there.cpu(), host.conj().resolve_conj())


# --------------------------------------------------------------------------------------------------------- out=


def check_out_of_the_right_shape_is_written_in_place() -> None:
    out = torch.zeros(2, 3).to("npu")
    address = out.data_ptr()
    x = torch.arange(3.0).to("npu")
    assert torch.add(x, 1, out=out[1]).tolist() == [1.0, 2.0, 3.0]
    assert out.cpu().tolist() == [[0.0] * 3, [1.0, 2.0, 3.0]]
    strided = torch.zeros(3, 2).to("npu")
    torch.mul(x, 2, out=strided[:, 1])
    assert strided.cpu().tolist() == [[0.0, 0.0], [0.0, 2.0], [0.0, 4.0]]
    torch.cat([x, x + 3], out=out.view(-1))
    assert out.data_ptr() == address
    assert out.view(-1).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def check_out_may_be_an_input() -> None:
    x = torch.arange(3.0).to("npu")
    torch.add(x, x, out=x)
    assert x.tolist() == [0.0, 2.0, 4.0]


def check_out_is_resized() -> None:
    x = torch.arange(6.0).to("npu")
    for before in ((0,), (2,), (9,), (2, 2), (2, 3)):
        out = torch.full(before, -1.0).to("npu")
        result = torch.add(x, 1, out=out)
        assert result is out
        assert out.shape == (6,), before
        assert out.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], before
    values, indices = torch.empty(0).to("npu"), torch.empty(1, dtype=torch.int64).to("npu")
    torch.topk(x, 2, out=(values, indices))
    assert values.tolist() == [5.0, 4.0]
    assert indices.tolist() == [5, 4]


def check_out_with_matmul_of_halves() -> None:
    left, right = make("b 5x8", 1), make("b 8x6", 2)
    expected = torch.mm(left.float(), right.float()).to(torch.bfloat16)
    previous = numerics.set_numerics("fp32-internal")
    try:
        for shape in ((0,), (5, 6), (2, 2), (3, 5, 6)):
            out = torch.zeros(shape, dtype=torch.bfloat16).to("npu")
            torch.mm(left.to("npu"), right.to("npu"), out=out)
            assert torch.equal(out.cpu(), expected), shape
    finally:
        numerics.set_numerics(previous)


def check_resize() -> None:
    x = torch.arange(6).to("npu")
    address = x.data_ptr()
    assert x.resize_(2, 2).tolist() == [[0, 1], [2, 3]]
    assert x.data_ptr() == address
    assert x.resize_(8).tolist()[:4] == [0, 1, 2, 3]
    assert torch.empty(2).to("npu").resize_as_(torch.empty(3, 4).to("npu")).shape == (3, 4)
    with refused(RuntimeError, "not simulated"):
        torch.empty(1, 2, 3, 4).to("npu").resize_((1, 2, 3, 5), memory_format=torch.channels_last)


# --------------------------------------------------------------------------------------------- refused mixtures


def check_mixed_devices_are_refused() -> None:
    host, there = torch.ones(4), torch.ones(4).to("npu")
    at = torch.tensor([1, 0])
    mask = torch.tensor([True, False, True, False])
    together = "on the same device"
    mixtures: dict[str, Callable[[], Any]] = {
        "add": lambda: host + there,
        "add the other way": lambda: there + host,
        "in place": lambda: there.add_(host),
        "in place on the host": lambda: host.mul_(there),
        "cat": lambda: torch.cat([there, host]),
        "stack": lambda: torch.stack([host, there]),
        "matmul": lambda: there.view(2, 2) @ host.view(2, 2),
        "linear": lambda: torch.nn.functional.linear(there, host.view(1, 4)),
        "embedding": lambda: torch.nn.functional.embedding(at, there.view(2, 2)),
        "embedding of the host": lambda: torch.nn.functional.embedding(at.to("npu"), host.view(2, 2)),
        "where": lambda: torch.where(mask, there, there),
        "masked_fill": lambda: there.masked_fill(mask, 0),
        "gather": lambda: there.gather(0, at),
        "index_select": lambda: there.index_select(0, at),
        "equal": lambda: torch.equal(host, there),
        "out on the host": lambda: torch.add(there, there, out=torch.empty(4)),
        "out on the device": lambda: torch.add(host, host, out=torch.empty(4).to("npu")),
        "two devices": lambda: host.to("npu:1") + host.to("npu:2"),
        "a device's number": lambda: host + torch.tensor(2.0).to("npu"),
    }
    for name, mixture in mixtures.items():
        with refused(RuntimeError, together):
            mixture()
            raise AssertionError(f"{name} was accepted")
    with refused(RuntimeError, "indices should be"):
        host[at.to("npu")]
    assert host.tolist() == there.tolist() == [1.0] * 4


def check_what_hardware_mixes_is_accepted() -> None:
    there = torch.arange(6.0).view(2, 3).to("npu")
    at = torch.tensor([1, 0, 1])
    assert there[at].device.type == "npu"
    assert there[at].tolist() == [[3.0, 4.0, 5.0], [0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert there[torch.tensor([True, False])].tolist() == [[0.0, 1.0, 2.0]]
    assert there[[0, 1], at[:2]].tolist() == [1.0, 3.0]
    there[at[:1]] = torch.tensor(9.0)
    assert there[1].tolist() == [9.0] * 3
    assert (there * torch.tensor(2.0)).device.type == "npu", "a number on the host goes with anything"
    assert (torch.tensor(2) + there).dtype == torch.float32
    there[0] = torch.tensor([7.0, 8.0, 9.0])
    assert there[0].tolist() == [7.0, 8.0, 9.0]


def check_a_storage_that_is_given_back() -> None:
    there = torch.ones(4).to("npu")
    other = there[2:]
    there.untyped_storage().resize_(0)
    assert other.isnan().all(), "who still reads it must notice"
    with refused(RuntimeError, "cannot grow"):
        torch.ones(4).to("npu").untyped_storage().resize_(1 << 20)
    host = torch.ones(4)
    host.untyped_storage().resize_(0)
    assert host.untyped_storage().nbytes() == 0


def check_errors_of_operators_pass() -> None:
    with refused(RuntimeError, "must match the size"):
        torch.ones(3).to("npu") + torch.ones(4).to("npu")
    with refused(RuntimeError, "shape '[4]' is invalid"):
        torch.ones(3).to("npu").view(4)
    with refused(IndexError, "out of"):
        torch.ones(3).to("npu")[torch.tensor([5])]
