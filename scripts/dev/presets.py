"""Fill the presets of examples/presets from swift_grpo_ext/share/presets, as `init` fills them."""

from __future__ import annotations

from pathlib import Path

from swift_grpo_ext.tools import share

FOLDER = Path(__file__).resolve().parents[2] / "examples/presets"


def main() -> None:
    for name in share.presets():
        for file, text in share.filled(name).items():
            (FOLDER / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
