from __future__ import annotations

import importlib

import pytest
import torch
from torch_npu._sim import numerics


def test_the_default_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(numerics.ENVIRONMENT_NAME, raising=False)
    assert importlib.reload(numerics).numerics() == "fp32-internal"


@pytest.mark.parametrize("name", ["native", "fp32-internal"])
def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(numerics.ENVIRONMENT_NAME, name)
    assert importlib.reload(numerics).numerics() == name
    assert numerics.is_native() is (name == "native")
    monkeypatch.delenv(numerics.ENVIRONMENT_NAME)
    importlib.reload(numerics)


@pytest.mark.parametrize("name", ["hf", "", "FP32"])
def test_another_value_is_refused_with_both_choices(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(numerics.ENVIRONMENT_NAME, name)
    with pytest.raises(ValueError, match="'native' or 'fp32-internal'"):
        importlib.reload(numerics)
    monkeypatch.delenv(numerics.ENVIRONMENT_NAME)
    importlib.reload(numerics)
    with pytest.raises(ValueError, match="'native' or 'fp32-internal'"):
        numerics.set_numerics(name)
    assert numerics.numerics() == "fp32-internal"


def test_internal_widens_unless_native() -> None:
    x = torch.zeros(2, dtype=torch.bfloat16)
    assert numerics.internal(x).dtype == torch.float32
    previous = numerics.set_numerics("native")
    assert numerics.internal(x) is x
    assert previous == "fp32-internal"
    assert numerics.set_numerics(previous) == "native"


def test_the_two_numerics_differ() -> None:
    from torch_npu._sim.ops.activation import npu_swiglu

    x = torch.linspace(-4, 4, 256).bfloat16()
    wide = npu_swiglu(x)
    previous = numerics.set_numerics("native")
    narrow = npu_swiglu(x)
    numerics.set_numerics(previous)
    assert not torch.equal(wide, narrow)
    assert torch.allclose(wide.float(), narrow.float(), rtol=2**-6)
