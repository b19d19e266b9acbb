"""Inside of the simulation: device, operators, collectives, and the table of shims beside them."""
