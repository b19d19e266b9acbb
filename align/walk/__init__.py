"""The walk: what to look at next, where it begins in time, and whether an accusation holds."""
