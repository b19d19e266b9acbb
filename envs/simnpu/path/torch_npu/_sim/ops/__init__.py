"""The simulated operators: functions on CPU tensors, registered by `@operator`."""
