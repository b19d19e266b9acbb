"""Stand-in for the CANN Python binding: only its names exist."""
