"""swift-grpo-ext: correct, reproducible, watched GRPO rollouts for vision-language models.

A plugin for ms-swift: `swift rlhf --rlhf_type grpo --external_plugins plugins/grpo_ext.py ...`.
Importing the package loads neither torch nor vLLM and changes nothing; `register()` does the work.
"""

from swift_grpo_ext.version import __version__

__all__ = ["__version__", "register"]


def register() -> None:
    """Add the trainer, the engine, the flags and the callbacks to ms-swift.

    Raises `ImportError` if the installed ms-swift lacks APIs that we extend.
    """
    from swift_grpo_ext.registry import register as register_all

    register_all()
