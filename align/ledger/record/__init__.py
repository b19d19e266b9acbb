"""What workers run: records, checksums, the memory of what was read, and the files.

Python 3.10, the standard library, torch and safetensors alone.
"""
