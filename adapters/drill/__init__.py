"""Faults that are put into live engines on purpose, each a patch of its own, and what they share."""
