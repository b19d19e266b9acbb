"""Float64 re-computation, on the driver, of each operator from what a side recorded and the checkpoint's weights."""

from align.oracle.cost import Cost, capture_cost, cost_table, estimate
from align.oracle.oracle import Oracle
from align.oracle.types import Cell, NotObservableError, OracleResult, Profile, RowPlace, Skipped

__all__ = [
    "Cell",
    "Cost",
    "NotObservableError",
    "Oracle",
    "OracleResult",
    "Profile",
    "RowPlace",
    "Skipped",
    "capture_cost",
    "cost_table",
    "estimate",
]
