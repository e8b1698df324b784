"""sdist and wheel have all files that an installation without a clone needs (I1)."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel from an sdist of a copy of this folder. The sdist has what is tracked,
    except for git's own files, pictures and results of benchmarks (MANIFEST.in)."""
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
    meant = {name for name in tracked() if name.startswith("scripts/bench/results/")}
    meant |= {name for name in tracked() if name.endswith(".png")}
    left_out = {name for name in tracked() if not (content / name).exists()}
    assert left_out == {".gitignore", *meant}
    return build("wheel", content, folder / "wheel")


def test_the_wheel_holds_the_package_alone(wheel: Path) -> None:
    """It has each tracked file; the links of `share` are files in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    own = {name for name in tracked() if name.startswith("swift_grpo_ext/")}
    shared = {name for name in inside if name.startswith("swift_grpo_ext/share/")}
    assert inside - shared == {name for name in own if "/share/" not in name}
    assert "swift_grpo_ext/share/examples/presets/colocate_1gpu.yaml" in shared
    assert all((ROOT / name).is_file() for name in shared)


def test_an_installation_changes_no_other_package(wheel: Path, tmp_path: Path) -> None:
    """In this environment, pip's report names what an installation would add. The installed command
    finds the plugin's file from an empty folder outside the clone."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    report = [*pip, "--dry-run", "--report", "-", str(wheel)]
    done = subprocess.run(report, capture_output=True, text=True, check=True)
    added = {canonicalize_name(i["metadata"]["name"]) for i in json.loads(done.stdout)["install"]}
    assert added <= {"swift-grpo-ext"}

    site = tmp_path / "site"
    subprocess.run([*pip, "--no-deps", "--no-index", "--target", site, wheel], check=True)
    code = "import sys; from swift_grpo_ext.tools.cli import main; sys.exit(main())"
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "plugin-path"],  # -P: as in a console script
        cwd=tmp_path / "empty",
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    plugin = Path(done.stdout.strip())
    assert plugin.is_relative_to(site)
    assert "swift_grpo_ext.register()" in plugin.read_text(encoding="utf-8")
