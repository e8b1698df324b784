"""sdist and wheel hold all that an installation without a clone needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.stack.processes import ROOT

pytestmark = [pytest.mark.stack, pytest.mark.extra]

SOURCES = ("swift_grpo_ext", "plugins", "examples", "scripts")
FILES = ("pyproject.toml", "README.md", "LICENSE")


def build(kind: str, source: Path, target: Path) -> Path:
    """An sdist or a wheel of a source folder; neither network nor isolation."""
    target.mkdir(exist_ok=True)
    code = f"from setuptools.build_meta import build_{kind} as b; print(b({str(target)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    return max(target.iterdir(), key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel, built from the sdist, was installed to."""
    folder = tmp_path_factory.mktemp("distribution")
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__", "results")
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, source)
    sdist = build("sdist", source, folder / "sdist")
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym()]
        archive.extractall(folder / "unpacked", filter="data")
    [unpacked] = (folder / "unpacked").iterdir()
    wheel = build("wheel", unpacked, folder / "wheel")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


def run(installed: Path, cwd: Path, *argv: str) -> str:
    """`swift-grpo-ext ARGV` of the installation."""
    env = {**os.environ, "PYTHONPATH": str(installed)}
    code = "import sys; from swift_grpo_ext.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, *argv]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=True)
    return done.stdout


def test_the_plugin_file_is_found(installed: Path, tmp_path: Path) -> None:
    file = Path(run(installed, tmp_path, "plugin-path").strip())
    assert file.is_relative_to(installed)
    assert "swift_grpo_ext.register()" in file.read_text(encoding="utf-8")


def test_a_preset_is_copied_and_holds_together(installed: Path, tmp_path: Path) -> None:
    for name in run(installed, tmp_path, "init", "x", "--list").splitlines():
        name = name.split()[0]
        run(installed, tmp_path, "init", name, "--preset", name)
        config = name if (tmp_path / name / "launch.sh").exists() else f"{name}.yaml"
        assert "error" not in run(installed, tmp_path / name, "check", config)
    copied = sorted(path.name for path in tmp_path.iterdir())
    presets = {path.name.split(".")[0] for path in (ROOT / "examples/presets").glob("*.yaml")}
    assert copied == sorted(presets)
