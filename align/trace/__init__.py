"""Everything one run of one side recorded: written by the engine's workers, read by the driver."""
