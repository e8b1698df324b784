"""sdist and wheel hold all that an installation without a clone needs."""

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
from compat.environment import PROTECTED
from packaging.utils import canonicalize_name

from swift_grpo_ext.record.reader import read_samples
from tests.stack.processes import ROOT
from tests.stack.rounds import PRESET

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="what is tracked is known in a clone only"
)

REWARD = """
from swift.rewards import ORM, orms


class Exact(ORM):
    def __call__(self, completions, solution, **kwargs):
        return [float(answer in text) for text, answer in zip(completions, solution)]


orms["exact"] = Exact
"""


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
def wheel(unpacked: Path) -> Path:
    """Built from the sdist."""
    return build("wheel", unpacked, unpacked.parent / "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The folder that the wheel was installed to, where no clone is."""
    site = wheel.parents[1] / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(site), str(wheel)], check=True)
    return site


def run(installed: Path, cwd: Path, entry: str, *argv: str) -> str:
    """Return what a console script of the environment prints, the installation before its clone."""
    module, _, function = entry.partition(":")
    as_script = "import sys; sys.path.remove('')"  # the folder that it stands in (3.11: -P)
    code = f"{as_script}; from {module} import {function} as main; sys.exit(main())"
    command = [sys.executable, "-c", code, *argv]
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_sdist_holds_what_is_tracked(unpacked: Path) -> None:
    """But for what git itself reads, pictures and results of benchmarks (MANIFEST.in)."""
    left_out = {name for name in tracked() if not (unpacked / name).exists()}
    meant = {name for name in tracked() if name.startswith("scripts/bench/results/")}
    meant |= {name for name in tracked() if name.endswith(".png")}
    assert left_out == {".gitignore", *meant}


def test_the_wheel_holds_the_package_alone(wheel: Path) -> None:
    """With each of its files that is tracked; `share`'s links are files there."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    own = {name for name in tracked() if name.startswith("swift_grpo_ext/")}
    shared = {name for name in inside if name.startswith("swift_grpo_ext/share/")}
    assert inside - shared == {name for name in own if "/share/" not in name}
    assert "swift_grpo_ext/share/plugins/grpo_ext.py" in shared
    assert all((ROOT / name).is_file() for name in shared)


def test_an_installation_changes_no_other_package(wheel: Path) -> None:
    """In an environment that has what is needed; pip would name what it installs beside it."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--report", "-", "--quiet"]
    done = subprocess.run([*command, str(wheel)], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    changed = {canonicalize_name(item["metadata"]["name"]) for item in report["install"]}
    assert changed.isdisjoint(PROTECTED)
    assert changed <= {"swift-grpo-ext"}, "an index was asked for more"


@pytest.fixture
def plugin(installed: Path, tmp_path: Path) -> str:
    return run(installed, tmp_path, "swift_grpo_ext.tools.cli:main", "plugin-path").strip()


def test_the_plugin_file_is_found(plugin: str, installed: Path) -> None:
    assert Path(plugin).is_relative_to(installed)
    assert "swift_grpo_ext.register()" in Path(plugin).read_text(encoding="utf-8")


@pytest.mark.stack
@pytest.mark.extra
def test_a_training_takes_the_plugin_from_the_wheel(
    plugin: str, installed: Path, tmp_path: Path, assets: Path
) -> None:
    """As in the README, in a folder that holds a reward function and nothing else."""
    (tmp_path / "exact.py").write_text(REWARD, encoding="utf-8")
    argv = [
        *("rlhf", str(PRESET), "--model", str(assets / "tiny_vlm"), "--save_strategy", "no"),
        *("--dataset", str(assets / "digits/train.jsonl"), "--max_steps", "1"),
        *("--external_plugins", plugin, "exact.py", "--reward_funcs", "exact"),
        *("--reward_weights", "1.0", "--callbacks", "diversity", "--num_generations", "4"),
        *("--per_device_train_batch_size", "8", "--add_version", "false", "--output_dir", "run"),
    ]
    run(installed, tmp_path, "swift.cli.main:cli_main", *argv)
    assert len(read_samples(tmp_path / "run")) == 8
    written = json.loads((tmp_path / "run/args.json").read_text(encoding="utf-8"))
    assert Path(written["external_plugins"][0]).is_relative_to(installed)
