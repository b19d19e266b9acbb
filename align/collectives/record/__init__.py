"""What the workers record of collectives, and its files; engine-side code as well: standard library and torch only."""
