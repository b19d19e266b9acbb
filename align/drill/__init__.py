"""Known faults in real engine runs, to measure what the harness says of them: ``align drill``."""
