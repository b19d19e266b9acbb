"""The table of what rounding may do."""

from __future__ import annotations

import pytest
import torch

from align.checkpoints.bounds import bounds, unit_roundoff
from align.checkpoints.table import kinds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unit_roundoff_is_the_largest_relative_error_of_one_rounding(dtype: torch.dtype) -> None:
    x = torch.linspace(1, 2, 1 << 20, dtype=torch.float64)[1:]
    largest = float(((x.to(dtype).double() - x).abs() / x).max())
    assert 0.98 * unit_roundoff(dtype) < largest <= unit_roundoff(dtype)


def test_names_of_dtypes_are_known_and_others_refused() -> None:
    assert unit_roundoff("bfloat16") == unit_roundoff(torch.bfloat16) == 2**-8
    with pytest.raises(ValueError, match=r"int8.*bfloat16"):
        unit_roundoff("int8")


#: Rows that the table of checkpoints does not name: they depend on the configuration, or belong to other families.
ORACLE_ALONE = {"gelu_mul", "scale", "topk_ids", "topk_weights", "gated_mlp", "expert_mix"}


def test_every_operator_of_the_dense_families_has_a_bound() -> None:
    exact = {"slots", "all_reduce"}  # judged as index lists and as relations between ranks
    dense = {"all", "gqa", "dense", "qwen3"}
    used = {one for kind in kinds().values() if set(kind.families) & dense for one in kind.operators}
    assert used - exact == set(bounds()) - ORACLE_ALONE - {"gated_add"}


def test_copies_are_exact_and_a_common_error_is_an_error() -> None:
    for row in bounds().values():
        assert (row.max_roundings == 0) == (row.operator in ("identity", "embedding"))
        assert 0 <= row.gain_roundings <= row.max_roundings
        assert row.derivation
