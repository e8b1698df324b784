"""Take the pictures of the docs with Chromium, from runs that these commands make:

    bash scripts/demo.sh
    for kind in collapse frozen; do bash scripts/diversity_demo.sh $kind; done
    python scripts/pictures.py    take all pictures; --runs FOLDER names another folder of runs

Chinese text needs a font that contains it, such as Debian's fonts-wqy-microhei.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pages import ROOT
from PIL import Image

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
VIEW = Path(sys.executable).with_name("swift-grpo-ext")
MAX_BYTES = 300_000
PICTURES = (
    ("docs/img/view_group.png", "digits-seed42", "group?round=train.23.0&group=3", (1280, 744)),
    ("examples/diversity/collapse.png", "diversity-collapse", "overview", (1000, 860)),
    ("examples/diversity/frozen.png", "diversity-frozen", "overview", (1000, 860)),
)
"""File, run's folder, page of `swift-grpo-ext view`, and size in pixels of each picture."""


@contextmanager
def served(run: Path) -> Iterator[str]:
    """Serve a run within the block; yield the address of its pages once they are complete."""
    folder = os.path.relpath(run, ROOT)  # pages show this path in their commands
    command = [str(VIEW), "view", folder, "--port", "0"]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            words = (word for line in process.stdout for word in line.split())
            address = next(word for word in words if word.startswith("http://127.0.0.1"))
            pages = f"{address}0/"
            while "reading …" in read(f"{pages}overview"):
                time.sleep(0.5)
            yield pages
        finally:
            process.terminate()


def read(address: str) -> str:
    with urllib.request.urlopen(address) as answer:
        return str(answer.read().decode())


def take(address: str, size: tuple[int, int], path: Path) -> None:
    """Take a picture of the top of a page with 256 colours."""
    with tempfile.TemporaryDirectory() as profile:
        raw = Path(profile) / "raw.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += ["--lang=en-US", "--virtual-time-budget=8000"]
        options += ["--window-size={},{}".format(*size), f"--user-data-dir={profile}"]
        options += [f"--screenshot={raw}", address]
        subprocess.run([str(BROWSER), *options], check=True, stderr=subprocess.DEVNULL)
        picture = Image.open(raw).convert("RGB")
    path.parent.mkdir(exist_ok=True)
    picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    num_bytes = path.stat().st_size
    if num_bytes > MAX_BYTES:
        raise ValueError(f"{path} has {num_bytes:,} bytes, expected at most {MAX_BYTES:,}")
    print(f"{path.relative_to(ROOT)}: {num_bytes:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=ROOT / "output", help="default: output")
    folder: Path = parser.parse_args().runs
    if BROWSER is None:
        parser.error("no browser found: install chromium or google-chrome")
    for name, run, page, size in PICTURES:
        if not (folder / run).is_dir():
            print(f"{name}: not taken, because {folder / run} does not exist (see --help)")
            continue
        with served(folder / run) as address:
            take(address + page, size, ROOT / name)


if __name__ == "__main__":
    main()
