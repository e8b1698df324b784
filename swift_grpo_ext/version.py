"""The version, importable without any dependency (the build reads it)."""

__version__ = "0.1.0"
