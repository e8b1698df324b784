"""Defines the version without importing any dependency, since the build reads it."""

__version__ = "0.1.0"
