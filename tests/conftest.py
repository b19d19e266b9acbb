"""What every test starts from, whoever started it."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Machines are shared: how long an example takes says nothing, and no test may depend on it.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

#: What make hands down to its recipes. The command words its errors by it, and a make under test obeys it.
OF_MAKE = ("MAKELEVEL", "MAKEFLAGS", "MFLAGS", "MAKE_TERMOUT", "MAKE_TERMERR")


@pytest.fixture(autouse=True, scope="session")
def _as_from_a_shell() -> None:
    """Tests see the same surroundings from `make test` as from a shell; one about make says so itself."""
    for name in OF_MAKE:
        os.environ.pop(name, None)
