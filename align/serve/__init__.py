"""The page of a run over HTTP, for this machine alone, with captured values on demand."""
