"""Floors: how far right engines are apart, measured on clean runs that legitimately differ, with their provenance."""
