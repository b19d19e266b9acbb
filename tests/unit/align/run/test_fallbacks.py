"""torch_npu's own words about operators that it runs on the host are read from an engine's log."""

from __future__ import annotations

from pathlib import Path

from align.run.fallbacks import parse_fallbacks, read_fallbacks

WORDS = "is not currently supported on the NPU backend and will fall back to run on the CPU. This may have performance"
ISIN = "VariableFallbackKernel.cpp:250] Warning: CAUTION: The operator 'aten::isin.Tensor_Tensor_out'"
NMS = "compiler_depend.ts:51] Warning: CAUTION: The operator 'torchvision::nms'"
LOG = f"""starting
[W {NMS} {WORDS} implications. (function npu_cpu_fallback)
[rank1]:[W107 21:14:04.20 {ISIN} {WORDS}
/opt/site-packages/lmdeploy/pytorch/nn/rope.py:31: UserWarning: CAUTION: The operator 'aten::cos' {WORDS} (Triggered …)
[rank0]:[W107 21:14:05.20 {ISIN} {WORDS}
Warning: kernel [ArgSort] can not support dtype int32 or int64 on AiCore, Now this kernel is running on AiCpu
"""


def test_each_operator_is_listed_once_with_its_place() -> None:
    found = {one["operator"]: (one["count"], one["place"]) for one in parse_fallbacks(LOG)}
    assert found == {
        "torchvision::nms": (1, ""),
        "aten::isin.Tensor_Tensor_out": (2, ""),
        "aten::cos": (1, "/opt/site-packages/lmdeploy/pytorch/nn/rope.py:31"),
    }


def test_a_log_without_them_and_no_log(tmp_path: Path) -> None:
    assert read_fallbacks(tmp_path) == []
    (tmp_path / "engine.log").write_bytes(b"nothing \xff here\n")
    assert read_fallbacks(tmp_path) == []
    (tmp_path / "engine.log").write_text(LOG)
    assert len(read_fallbacks(tmp_path)) == 3
