"""This room lets vLLM, ms-swift and gloo work without an accelerator; nothing here runs beside one.

The core meets it at three places: `registry.py` and `command_line.py` (the patches, the settings),
and the class that an engine's workers are extended with.
"""
