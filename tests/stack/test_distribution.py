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


def build(kind: str, source: Path, target: Path) -> Path:
    """An sdist or a wheel of a source folder; neither network nor isolation."""
    target.mkdir(exist_ok=True)
    code = f"from setuptools.build_meta import build_{kind} as b; print(b({str(target)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    return max(target.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def tracked() -> list[str]:
    """The files of this folder: those of the commit and new ones that are not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an sdist that was made from a copy of this one."""
    folder = tmp_path_factory.mktemp("distribution")
    for name in tracked():
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target, follow_symlinks=False)
    sdist = build("sdist", folder / "source", folder / "sdist")
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym()]
        archive.extractall(folder / "unpacked", filter="data")
    [content] = (folder / "unpacked").iterdir()
    return content


@pytest.fixture(scope="module")
def installed(unpacked: Path) -> Path:
    """The folder that the wheel, built from the sdist, was installed to."""
    site = unpacked.parent / "site"
    wheel = build("wheel", unpacked, unpacked.parent / "wheel")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(site), str(wheel)], check=True)
    return site


def run(installed: Path, cwd: Path, *argv: str) -> str:
    """`swift-grpo-ext ARGV` of the installation."""
    env = {**os.environ, "PYTHONPATH": str(installed)}
    code = "import sys; from swift_grpo_ext.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, *argv]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=True)
    return done.stdout


def test_the_sdist_holds_what_is_tracked(unpacked: Path) -> None:
    """But for what git itself reads; `share`'s links are files there."""
    left_out = [name for name in tracked() if not (unpacked / name).exists()]
    assert left_out == [".gitignore"]


def test_the_sdist_passes_its_own_quick_tests(unpacked: Path) -> None:
    """With its own package, helpers and settings of pytest."""
    quick = ["tests/sampling", "tests/rollout/test_wire.py", "tests/test_translations.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *quick]
    env = {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run(command, cwd=unpacked, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    code = "import swift_grpo_ext; print(swift_grpo_ext.__file__)"
    command = [sys.executable, "-c", code]
    where = subprocess.run(command, cwd=unpacked, env=env, capture_output=True, text=True)
    assert Path(where.stdout.strip()).is_relative_to(unpacked)


def test_the_plugin_file_is_found(installed: Path, tmp_path: Path) -> None:
    file = Path(run(installed, tmp_path, "plugin-path").strip())
    assert file.is_relative_to(installed)
    assert "swift_grpo_ext.register()" in file.read_text(encoding="utf-8")


def test_a_preset_is_copied_and_holds_together(installed: Path, tmp_path: Path) -> None:
    for name in run(installed, tmp_path, "init", "x", "--list").splitlines():
        name = name.split()[0]
        run(installed, tmp_path, "init", name, "--preset", name)
        config = name if (tmp_path / name / "launch.sh").exists() else f"{name}.yaml"
        assert "error" not in run(installed, tmp_path / name, "check", "--settings-only", config)
    copied = sorted(path.name for path in tmp_path.iterdir())
    presets = {path.name.split(".")[0] for path in (ROOT / "examples/presets").glob("*.yaml")}
    assert copied == sorted(presets)
