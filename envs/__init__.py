"""How each interpreter is built and recognised: locks, the builder and the device profiles."""
