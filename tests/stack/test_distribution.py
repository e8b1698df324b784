"""sdist and wheel have all files that an installation without a clone needs (I1)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from compatibility import PROTECTED
from packaging.utils import canonicalize_name

from tests.rig.processes import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="what is tracked is known in a clone only"
)


def tracked() -> list[str]:
    """Return the files of this clone: committed ones, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def build(kind: str, source: Path, target: Path) -> Path:
    """Build an sdist or a wheel of a source folder, without network and isolation."""
    target.mkdir()
    code = f"from setuptools.build_meta import build_{kind} as b; print(b({str(target)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    [built] = target.iterdir()
    return built


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
    shutil.unpack_archive(sdist, folder / "unpacked")
    [content] = (folder / "unpacked").iterdir()
    return content


@pytest.fixture(scope="module")
def wheel(unpacked: Path) -> Path:
    return build("wheel", unpacked, unpacked.parent / "wheel")


def test_the_sdist_holds_what_is_tracked(unpacked: Path) -> None:
    """Except for git's own files, pictures and results of benchmarks (MANIFEST.in)."""
    left_out = {name for name in tracked() if not (unpacked / name).exists()}
    meant = {name for name in tracked() if name.startswith("scripts/bench/results/")}
    meant |= {name for name in tracked() if name.endswith(".png")}
    assert left_out == {".gitignore", *meant}


def test_the_wheel_holds_the_package_alone(wheel: Path) -> None:
    """It has each tracked file; the links of `share` are files in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    own = {name for name in tracked() if name.startswith("swift_grpo_ext/")}
    shared = {name for name in inside if name.startswith("swift_grpo_ext/share/")}
    assert inside - shared == {name for name in own if "/share/" not in name}
    expected = ("plugins/grpo_ext.py", "examples/presets/colocate_1gpu.yaml")
    assert {f"swift_grpo_ext/share/{name}" for name in expected} <= shared
    assert all((ROOT / name).is_file() for name in shared)


def test_an_installation_changes_no_other_package(wheel: Path) -> None:
    """In this environment, pip's report names what an installation would add."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--report", "-", "--quiet"]
    done = subprocess.run([*command, str(wheel)], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    changed = {canonicalize_name(item["metadata"]["name"]) for item in report["install"]}
    assert changed.isdisjoint(PROTECTED)
    assert changed <= {"swift-grpo-ext"}, "an index was asked for more"


def test_the_plugin_file_is_found(wheel: Path, tmp_path: Path) -> None:
    """The installed command finds it from an empty folder outside the clone."""
    site = wheel.parents[1] / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(site), str(wheel)], check=True)
    code = "import sys; from swift_grpo_ext.tools.cli import main; sys.exit(main())"
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "plugin-path"],  # -P: as in a console script
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    plugin = Path(done.stdout.strip())
    assert plugin.is_relative_to(site)
    assert "swift_grpo_ext.register()" in plugin.read_text(encoding="utf-8")
