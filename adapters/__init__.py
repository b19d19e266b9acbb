"""The only code that knows an engine. It runs inside that engine's own interpreter.

Everything here uses the standard library, torch, numpy and safetensors, and the engine itself in its own folder, so
that an interpreter we did not build can run it from nothing but a path entry.
"""
