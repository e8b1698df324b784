"""ms-swift's logger, for modules that work without ms-swift (`scripts/gpu.sh`)."""

from __future__ import annotations

import logging


def get_logger() -> logging.Logger:
    """Return the logger that ms-swift, where it is installed, formats and sets a level of."""
    return logging.getLogger("swift")
