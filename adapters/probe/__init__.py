"""What all adapters share inside an engine's workers: arrival of the hooks, the spec they read, the log they write."""
