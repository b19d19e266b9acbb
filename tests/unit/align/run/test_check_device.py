"""What the simulated device cannot run is refused by name, and what only it has is refused to hardware."""

from __future__ import annotations

import dataclasses

import pytest

from align.case.schema import Batch, Numerics
from align.errors import UserError
from align.run.plan import check_device, check_launchable
from tests.unit.align.run import fakes


def test_architectures_without_simulated_operators() -> None:
    info = dataclasses.replace(fakes.info(), config={"architectures": ["MixtralForCausalLM"]})
    with pytest.raises(UserError, match="MixtralForCausalLM"):
        check_device(fakes.case(), info, "simnpu")
    check_device(fakes.case(), info, "ascend")


def test_quantised_models() -> None:
    config = {"architectures": ["Qwen3ForCausalLM"], "quantization_config": {"quant_method": "awq"}}
    with pytest.raises(UserError, match="quantised \\(awq\\)"):
        check_device(fakes.case(), dataclasses.replace(fakes.info(), config=config), "simnpu")


def test_numerics_are_the_simulation_s() -> None:
    with pytest.raises(UserError, match="the device is ascend"):
        check_device(fakes.case(numerics=Numerics(candidate="native")), fakes.info(), "ascend")


@pytest.mark.parametrize("block_size", [1, 8, 64, 100, 256])
def test_block_sizes_that_an_engine_refuses(block_size: int) -> None:
    with pytest.raises(UserError, match=f"block_size {block_size}"):
        check_launchable(fakes.case(batch=Batch(block_size=block_size)))


def test_the_block_size_that_both_take() -> None:
    check_launchable(fakes.case(batch=Batch(block_size=128)))
    with pytest.raises(UserError) as caught:
        check_launchable(fakes.case(batch=Batch(block_size=256)))
    assert caught.value.hint == "use 128, the only one"


@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_lmdeploy_takes_others(block_size: int) -> None:
    check_launchable(fakes.case(batch=Batch(block_size=block_size), reference="lmdeploy"))
