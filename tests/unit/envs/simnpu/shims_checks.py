"""Everything the simulation changes beside the device; run by test_shims.py with torch_npu not loaded yet."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.envs.simnpu.session import refused

assert "torch_npu" not in sys.modules, "run with TORCH_DEVICE_BACKEND_AUTOLOAD=0"
_PLACES: dict[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.Module": torch.nn.Module,
    "torch.UntypedStorage": torch.UntypedStorage,
    "torch.accelerator": torch.accelerator,
    "torch.version": torch.version,
    "torch.distributed": dist,
    "torch.ops": torch.ops,
    "torch.cuda": torch.cuda,
    "torch.autograd": torch.autograd,
    "torch.nn.functional": torch.nn.functional,
    "torch.library": torch.library,
    "torch.library.Library": torch.library.Library,
}
_before = {place: dict(vars(owner)) for place, owner in _PLACES.items()}
_path_before = list(sys.meta_path)

import torch_npu  # noqa: E402
from torch_npu._sim import shims  # noqa: E402

_changed = {
    place: {name for name, value in vars(owner).items() if _before[place].get(name, shims) is not value}
    for place, owner in _PLACES.items()
}
npu: Any = torch_npu.npu


def check_nothing_else_of_torch_is_changed() -> None:
    """What is not the device, its collectives or in the table stays as it is."""
    factories = {"empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "empty_like", "zeros_like"}
    accelerator = {
        "current_device_index", "current_stream", "device_count", "empty_cache", "get_memory_info", "is_available",
        "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved", "memory_stats",
        "reset_peak_memory_stats", "set_device_index", "set_stream", "synchronize",
    }  # fmt: skip
    allowed = {
        "torch": factories | {"npu"},
        "torch.Tensor": {"pin_memory", "is_pinned", "npu", "is_npu"},
        "torch.nn.Module": {"npu"},
        "torch.UntypedStorage": {"clone", "resize_"},
        "torch.accelerator": accelerator,
        "torch.version": {"cann"},
        "torch.distributed": {"all_gather", "reduce_scatter", "is_hccl_available", "ProcessGroupHCCL", "hccl"},
        "torch.library.Library": {"define", "impl"},
        "torch.ops": {"load_library", "npu", "atb", "_C_ascend", "c10d"},
    }
    for place, changed in _changed.items():
        names = changed - {"__warningregistry__"}
        assert names <= allowed.get(place, set()), f"{place}: {names - allowed.get(place, set())}"
    assert factories <= _changed["torch"]
    assert accelerator == _changed["torch.accelerator"]
    assert len(set(map(id, sys.meta_path)) - set(map(id, _path_before))) == 1


def check_the_table_can_be_printed() -> None:
    for shim in shims.TABLE:
        for text in (shim.target, shim.stand_in, shim.reason):
            assert text.strip() == text != ""
            assert "\n" not in text
        assert not shim.before or shim.module, "there is no before without a module"
    assert len({shim.target for shim in shims.TABLE}) == len(shims.TABLE)
    functions = {shim.apply for shim in shims.TABLE}
    assert len(functions) == len(shims.TABLE)
    for name, reason in shims.STAND_IN_MODULES.items():
        assert "." in name
        assert reason


def check_every_row_without_a_module_is_in_force() -> None:
    assert torch.zeros(2, pin_memory=True).tolist() == [0.0, 0.0]
    assert not torch.zeros(2, pin_memory=True).is_pinned()
    x = torch.ones(2)
    assert x.pin_memory() is x
    assert vars(torch.version)["cann"] == "simulated"
    assert torch.accelerator.device_count() == npu.device_count()
    torch.ops.load_library("/nowhere/libop_plugin_atb.so")
    with refused(OSError, "/nowhere/other.so"):
        torch.ops.load_library("/nowhere/other.so")


def check_pinned_factories_keep_their_arguments() -> None:
    assert torch.full((2,), 3, pin_memory=True).tolist() == [3, 3]
    assert torch.arange(1, 4, pin_memory=True).tolist() == [1, 2, 3]
    assert torch.empty_like(torch.ones(2, 3), pin_memory=True).shape == (2, 3)
    assert torch.tensor([1.5], dtype=torch.float64, pin_memory=True).dtype == torch.float64
    assert torch.zeros.__name__ == "zeros"
    assert torch.zeros.__doc__ and "scalar value `0`" in torch.zeros.__doc__


# --------------------------------------------------------------------------------------------------- after import


@contextmanager
def modules(**sources: str) -> Iterator[Path]:
    """Importable modules; ``a__b`` is ``a/b.py``, and a name that others begin with is a package."""
    with tempfile.TemporaryDirectory() as folder:
        for name, source in sources.items():
            file = Path(folder, *name.split("__"))
            package = any(other.startswith(name + "__") for other in sources)
            target = file / "__init__.py" if package else file.with_suffix(".py")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source)
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield Path(folder)
        finally:
            sys.path.remove(folder)
            for name in [name for name in sys.modules if name.split(".")[0] in {s.split("__")[0] for s in sources}]:
                del sys.modules[name]


@contextmanager
def rows(*more: shims.Shim) -> Iterator[None]:
    table, known = shims.TABLE, vars(shims)
    known["TABLE"] = (*table, *more)
    try:
        yield
    finally:
        known["TABLE"] = table


def _recorder(events: list[str], word: str) -> Any:
    def apply(module: Any) -> None:
        assert isinstance(module, ModuleType)
        events.append(f"{word} {module.__name__} {getattr(module, 'VALUE', 'not executed')}")
        if word == "after":
            vars(module)["VALUE"] = "patched"

    return apply


def _row(module: str, events: list[str], before: bool = False) -> shims.Shim:
    return shims.Shim(
        "target", "stand-in", "reason", module, _recorder(events, "before" if before else "after"), before
    )


def check_rows_are_applied_once_around_the_module() -> None:
    events: list[str] = []
    with modules(shimmed="VALUE = 'executed'"), rows(_row("shimmed", events), _row("shimmed", events, before=True)):
        module = importlib.import_module("shimmed")
        importlib.import_module("shimmed")
        assert events == ["before shimmed not executed", "after shimmed executed"]
        assert vars(module)["VALUE"] == "patched"
        importlib.reload(module)
        assert events[2:] == ["before shimmed patched", "after shimmed executed"], "a reload runs the module again"
        assert module.__spec__ is not None and module.__spec__.origin and module.__spec__.origin.endswith("shimmed.py")


def check_modules_that_import_each_other() -> None:
    events: list[str] = []
    inner = {"pack": "import pack.first", "pack__first": "import pack.second\nVALUE = 1", "pack__second": "VALUE = 2"}
    with modules(**inner), rows(_row("pack.first", events), _row("pack.second", events), _row("pack", events)):
        importlib.import_module("pack.first")
        assert events == ["after pack.second 2", "after pack.first 1", "after pack not executed"]


def check_modules_beside_the_table_are_left_alone() -> None:
    events: list[str] = []
    with modules(shimmed="VALUE = 1", other="VALUE = 2"), rows(_row("shimmed", events)):
        assert importlib.import_module("other").VALUE == 2
        assert importlib.util.find_spec("shimmed") is not None, "to be asked about is not to be imported"
        assert importlib.util.find_spec("invented_by_a_test") is None
        assert events == []


def check_a_missing_module_of_the_table_is_missing() -> None:
    with rows(_row("invented_by_a_test", [])), refused(ModuleNotFoundError, "No module named 'invented_by_a_test'"):
        importlib.import_module("invented_by_a_test")


def check_an_error_in_the_module_passes() -> None:
    events: list[str] = []
    with modules(broken="raise LookupError('inside')"), rows(_row("broken", events)):
        with refused(LookupError, "inside"):
            importlib.import_module("broken")
        assert events == []
        assert "broken" not in sys.modules


def check_installing_again_changes_nothing() -> None:
    finders = len(sys.meta_path)
    zeros = torch.zeros
    shims.install()
    torch_npu._autoload()
    assert len(sys.meta_path) == finders
    assert torch.zeros is zeros


def check_build_info_and_the_compiled_module() -> None:
    sources = {"vllm_ascend": "", "vllm_ascend___build_info": "__device_type__ = 'wheel'\n__soc_version__ = 'wheel'"}
    generation = os.environ.get("ALIGN_SIMNPU_SOC", "A2")
    with modules(vllm_ascend="") as folder:
        (folder / "vllm_ascend.py").unlink()
        (folder / "vllm_ascend").mkdir()
        (folder / "vllm_ascend" / "__init__.py").write_text(sources["vllm_ascend"])
        (folder / "vllm_ascend" / "_build_info.py").write_text(sources["vllm_ascend___build_info"])
        importlib.invalidate_caches()
        info = importlib.import_module("vllm_ascend._build_info")
        assert info.__device_type__ == generation
        assert info.__soc_version__.startswith("ascend910b" if generation == "A2" else "ascend910_93")
        compiled = importlib.import_module("vllm_ascend.vllm_ascend_C")
        assert compiled.__doc__ and compiled.__doc__.startswith("Stand-in of the simulation: ")
        assert importlib.import_module("vllm_ascend.vllm_ascend_C") is compiled


def check_torchvision_finds_its_schemas() -> None:
    source = "import torch\nSEEN = [str(torch.ops.torchvision.nms.default._schema)]"
    with modules(torchvision=source):
        seen = importlib.import_module("torchvision").SEEN
    assert seen == ["torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"]


def check_the_slot_kernel_is_put_into_its_module() -> None:
    with modules(vllm="", vllm__v1="", vllm__v1__worker="", vllm__v1__worker__block_table="def f(): ...") as folder:
        assert (folder / "vllm" / "v1" / "worker").is_dir()
        module = importlib.import_module("vllm.v1.worker.block_table")
        assert isinstance(vars(module)["_compute_slot_mapping_kernel"], shims._SlotMapping)


# --------------------------------------------------------------------------------------------------- slot mapping


@settings(max_examples=150, deadline=None, database=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=6),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)
def slots_equal_brute_force(spans: list[tuple[int, int]], block_size: int, spare: int, random: Any) -> None:
    """``spans``: first position and count of each request's new tokens."""
    width = -(-max(start + count for start, count in spans) // block_size) + 1
    table = [[random.randrange(1000) for _ in range(width)] for _ in range(len(spans) + 2)]
    positions = [start + at for start, count in spans for at in range(count)]
    starts = [0, *itertools.accumulate(count for _, count in spans)]
    tokens = len(positions)
    # The buffers of the engine are longer than what one step uses.
    mapping = torch.full((tokens + spare,), -7, dtype=torch.int64).to("npu")
    given_positions = torch.tensor([*positions, *[3] * spare], dtype=torch.int64).to("npu")
    shims._SlotMapping()[(len(spans) + 1,)](
        tokens, tokens + spare, torch.tensor([*starts, 0, 0], dtype=torch.int32).to("npu"), given_positions,
        torch.tensor(table, dtype=torch.int32).to("npu"), width, block_size, mapping,
        TOTAL_CP_WORLD_SIZE=1, TOTAL_CP_RANK=0, CP_KV_CACHE_INTERLEAVE_SIZE=1, PAD_ID=-1, BLOCK_SIZE=1024,
    )  # fmt: skip
    expected = []
    for row, (start, count) in enumerate(spans):
        for position in range(start, start + count):
            block, offset = divmod(position, block_size)
            expected.append(table[row][block] * block_size + offset)
    assert mapping.tolist() == [*expected, *[-1] * spare]


def check_slots_equal_brute_force() -> None:
    slots_equal_brute_force()


def check_slots_under_context_parallelism_are_refused() -> None:
    empty = torch.zeros(1, dtype=torch.int32)
    with refused(RuntimeError, "context parallelism"):
        shims._SlotMapping()[(2,)](0, 1, empty, empty, empty, 1, 1, empty, PAD_ID=-1, TOTAL_CP_WORLD_SIZE=2)
