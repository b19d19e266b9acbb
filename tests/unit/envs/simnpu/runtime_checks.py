"""torch.npu beside tensors; run by test_runtime.py."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch_npu

from tests.unit.envs.simnpu.session import refused

npu: Any = torch_npu.npu
accelerator: Any = torch.accelerator
A3 = os.environ.get("ALIGN_SIMNPU_SOC", "").upper() == "A3"


def check_torch_npu_is_the_module() -> None:
    assert vars(torch)["npu"] is npu
    assert npu.is_available()
    assert npu.is_initialized()
    assert not npu._is_in_bad_fork()
    npu.init()
    npu._lazy_init()
    for name in npu.__all__:
        assert hasattr(npu, name), name


def check_generation() -> None:
    """The numbers by which dlinfer and vllm-ascend tell generations apart."""
    version = npu.get_soc_version()
    assert (250 <= version <= 255) if A3 else (220 <= version <= 225)
    assert npu.get_device_name().startswith("Ascend910_93" if A3 else "Ascend910B")
    assert npu.get_device_properties().name == npu.get_device_name()
    assert npu.get_device_capability() is None


def check_devices() -> None:
    count = int(os.environ.get("ALIGN_SIMNPU_DEVICES", "8"))
    assert npu.device_count() == count
    assert npu.current_device() == 0
    last = count - 1
    for text in (last, f"npu:{last}", torch.device("npu", last)):
        npu.set_device(text)
        assert npu.current_device() == last
        npu.set_device(0)
    npu.set_device("npu")
    assert npu.current_device() == 0
    for wrong in (count, -1, f"npu:{count}"):
        with refused(RuntimeError, "ALIGN_SIMNPU_DEVICES"):
            npu.set_device(wrong)
    with refused(ValueError, "expected an npu device"):
        npu.set_device("cpu")
    assert npu.current_device() == 0


def check_device_context() -> None:
    with npu.device(1):
        assert npu.current_device() == 1
        with npu.device("npu:2"):
            assert npu.current_device() == 2
        with npu.device(None), npu.device(-1):
            assert npu.current_device() == 1
    assert npu.current_device() == 0
    again = npu.device(3)
    with again, again:
        assert npu.current_device() == 3
    assert npu.current_device() == 0
    with contextlib.suppress(KeyError), npu.device(1):
        raise KeyError
    assert npu.current_device() == 0

    @npu.device(2)  # type: ignore[untyped-decorator]
    def where(depth: int = 1) -> int:
        return int(where(depth - 1)) if depth else int(npu.current_device())

    assert where() == 2
    assert npu.current_device() == 0
    with refused(RuntimeError, "invalid device index"), npu.device(77):
        pass


def check_streams() -> None:
    default = npu.current_stream()
    assert default is npu.default_stream()
    mine, other = npu.Stream(), npu.Stream(device="npu:1", priority=-1)
    assert str(other.device) == "npu:1"
    assert mine.stream_id != other.stream_id
    with npu.stream(mine):
        assert npu.current_stream() is mine
        with npu.stream(other):
            assert npu.current_stream() is other
        with npu.stream(None):
            assert npu.current_stream() is mine
    assert npu.current_stream() is default
    with mine, other, mine:
        assert npu.current_stream() is mine
    assert npu.current_stream() is default
    npu.set_stream(other)
    assert npu.current_stream() is other
    npu.set_stream(default)
    mine.wait_stream(other)
    mine.wait_event(other.record_event())
    mine.synchronize()
    assert mine.query()
    npu.synchronize()


def check_streams_belong_to_threads() -> None:
    mine = npu.Stream()
    seen = []
    with npu.stream(mine):
        thread = threading.Thread(target=lambda: seen.append(npu.current_stream()))
        thread.start()
        thread.join()
    assert seen == [npu.default_stream()]


def check_events() -> None:
    start, end = npu.Event(enable_timing=True), npu.Event(enable_timing=True)
    with refused(RuntimeError, "must be recorded"):
        start.elapsed_time(end)
    start.record()
    time.sleep(0.02)
    end.record(npu.current_stream())
    assert 20 <= start.elapsed_time(end) < 60_000
    end.synchronize()
    end.wait()
    assert end.query()
    end.reset()
    with refused(RuntimeError, "must be recorded"):
        start.elapsed_time(end)
    assert npu.ExternalEvent is npu.Event


def check_work_is_done_when_it_is_issued() -> None:
    side = npu.Stream()
    with npu.stream(side):
        x = torch.ones(1000, device="npu").cumsum(0)
    event = side.record_event()
    npu.current_stream().wait_event(event)
    assert x[-1].item() == 1000


def check_graph_capture_is_refused() -> None:
    calls: dict[str, Callable[[], Any]] = {
        "NPUGraph": npu.NPUGraph,
        "torch.npu.graph": lambda: npu.graph(None),
        "graph_task_group_begin": lambda: npu.graph_task_group_begin(None),
        "graph_task_group_end": lambda: npu.graph_task_group_end(None),
        "graph_task_update_begin": lambda: npu.graph_task_update_begin(None, None),
        "graph_task_update_end": lambda: npu.graph_task_update_end(None),
    }
    for name, call in calls.items():
        with refused(RuntimeError, f"{name} needs graph capture, which is not simulated; launch the engine in eager"):
            call()
    assert not npu.is_current_stream_capturing()


def check_other_features_are_refused_by_name() -> None:
    import acl.rt
    from torch_npu.multiprocessing import reductions
    from torch_npu.profiler import dynamic_profile

    for call, words in (
        (npu.memory.MemPool, "without sleep mode"),
        (npu.memory.NPUPluggableAllocator, "without sleep mode"),
        (npu.memory.use_mem_pool, "without sleep mode"),
        (reductions.rebuild_npu_tensor, "between processes"),
        (lambda: dynamic_profile.init("x"), "profiling"),
        (dynamic_profile.start, "profiling"),
        (acl.rt.memcpy, "without sleep mode"),
    ):
        with refused(RuntimeError, words):
            call()
    assert npu.memory.memory_snapshot() == []
    dynamic_profile.step()


def check_unknown_attributes() -> None:
    with refused(AttributeError, "add it under envs/simnpu/path/torch_npu"):
        torch_npu.invented  # noqa: B018
    unknown: Any = torch_npu
    with refused(Exception, "npu_invented"):
        unknown.npu_invented(torch.ones(2).to("npu"))


def check_memory_numbers() -> None:
    total = int(os.environ.get("ALIGN_SIMNPU_MEMORY_GIB", "16")) << 30
    assert npu.mem_get_info() == (total, total)
    assert npu.get_device_properties().total_memory == total
    assert npu.memory_allocated() > 1 << 20
    assert npu.memory_stats()["allocated_bytes.all.current"] > 1 << 20
    assert npu.memory_stats()["no such number"] == 0
    npu.empty_cache()
    npu.reset_peak_memory_stats()
    npu.ipc_collect()


def check_accelerator() -> None:
    assert accelerator.is_available()
    assert accelerator.current_accelerator().type == "npu"
    assert accelerator.device_count() == npu.device_count()
    accelerator.set_device_index(1)
    assert accelerator.current_device_index() == npu.current_device() == 1
    accelerator.set_device_index(0)
    accelerator.synchronize()
    accelerator.empty_cache()
    assert accelerator.current_stream() is npu.current_stream()
    assert accelerator.memory_allocated() > 0
    assert accelerator.get_memory_info() == npu.mem_get_info()


def check_seeds() -> None:
    npu.manual_seed(3)
    first = torch.randn(4, device="npu").cpu()
    state = npu.get_rng_state()
    second = torch.randn(4, device="npu").cpu()
    npu.manual_seed_all(3)
    assert torch.equal(torch.randn(4, device="npu").cpu(), first)
    npu.set_rng_state(state)
    assert torch.equal(torch.randn(4, device="npu").cpu(), second)


def check_small_answers() -> None:
    assert torch.bfloat16 in npu.get_amp_supported_dtype()
    assert npu.is_bf16_supported()
    npu.set_compile_mode(jit_compile=False)
    x = torch_npu.empty_with_format((2, 3), torch.float16, acl_format=torch_npu.Format.FRACTAL_NZ)
    assert (x.device.type, x.shape, x.dtype) == ("npu", (2, 3), torch.float16)
    from torch_npu._C import _weak_ref_tensor
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL
    from torch_npu.op_plugin.atb._atb_ops import _register_atb_extensions
    from torch_npu.profiler import AiCMetrics, ProfilerActivity
    from torch_npu.utils._path_manager import PathManager

    assert _weak_ref_tensor(x) is x
    assert ProcessGroupHCCL.Options().hccl_config == {}
    _register_atb_extensions()
    assert AiCMetrics.PipeUtilization == "PipeUtilization"
    assert ProfilerActivity.NPU is ProfilerActivity.CPU
    PathManager.check_directory_path_readable("/nowhere")
