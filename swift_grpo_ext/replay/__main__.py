"""`python -m swift_grpo_ext.replay`: the same as `swift-grpo-ext replay`."""

from __future__ import annotations

import argparse
import sys

from swift_grpo_ext.replay.arguments import add_arguments

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="swift-grpo-ext replay")
    add_arguments(parser)
    options = parser.parse_args()
    sys.exit(options.run(options))
