"""``result.json``: what a run found, versioned and documented, for programs."""
