"""A third engine that only has to be right: transformers in float32, along the tokens that both sides followed."""
