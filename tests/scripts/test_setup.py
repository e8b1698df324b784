"""`scripts/setup.sh`: each failure by its cause, and environments that are broken or half made.

A stand-in for Python takes the place of the interpreter: it makes the environment's folder, and
pip says and does what a test wants.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = r"""#!/bin/bash
echo "$*" >>"$CALLS"
case "$1 $2" in
  "-c import sys;"*) echo 3.11 ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && [ -z "$NO_PIP" ] && touch "$3/pip" ;;
  "-m pip")
    [ -e "$(dirname "$0")/../pip" ] || { echo "No module named pip"; exit 1; }
    [ "$3" != install ] || [ -z "$SLOW" ] || sleep 60
    [ "$3" != install ] || [ -z "$PIP_SAYS" ] || { echo "$PIP_SAYS"; exit 1; } ;;
esac
"""


def test_threads_of_scripts_sleep_while_they_wait() -> None:
    """One busy core makes spinning ones ten times slower; what a user has set wins."""

    def policy(**env: str) -> str:
        script = "source scripts/common.sh; printenv OMP_WAIT_POLICY"
        command = ["bash", "-c", script]
        env["PATH"] = os.environ["PATH"]
        return subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE).stdout.decode()

    assert policy() == "PASSIVE\n"
    assert policy(OMP_WAIT_POLICY="ACTIVE") == "ACTIVE\n"


class Clone:
    """A folder with the script and all that it reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "clone/scripts").mkdir(parents=True)
        for name in ("setup.sh", "common.sh", "torchvision_schemas.py"):
            shutil.copy(ROOT / "scripts" / name, folder / "clone/scripts")
        (folder / "clone/scripts/requirements-cpu.txt").write_text("torch==2.13.0+cpu\n")
        (folder / "clone/pyproject.toml").write_text("")
        (folder / "bin").mkdir()
        interpreter = folder / "bin/python3.11"
        interpreter.write_text(INTERPRETER)
        interpreter.chmod(0o755)
        self.calls = folder / "calls"

    def start(self, **env: str) -> subprocess.Popen[str]:
        self.calls.write_text("")
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            **{"NO_PIP": "", "SLOW": "", "PIP_SAYS": "", **env},
        }
        return subprocess.Popen(
            ["bash", "scripts/setup.sh"],
            cwd=self.folder / "clone",
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, **env: str) -> tuple[int, str]:
        process = self.start(**env)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    @property
    def venv(self) -> Path:
        return self.folder / "clone/.venv"

    @property
    def installs(self) -> int:
        return self.calls.read_text().count("-m pip install")


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_a_second_set_up_does_nothing(clone: Clone) -> None:
    assert clone.run()[0] == 0
    assert clone.installs == 3
    assert clone.run() == (0, "")
    assert clone.installs == 0


GAVE_UP = """WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConn
ectionError('[Errno 111] Connection refused')': /simple/torch/
ERROR: No matching distribution found for torch==2.13.0+cpu"""

CAUSES = {
    GAVE_UP: "could not be reached",
    "OSError: [Errno 28] No space left on device": "the disk is full",
    "ERROR: No matching distribution found for torch==2.13.0+cpu": "PIP_EXTRA_INDEX_URL",
    "ERROR: No matching distribution found for zipp==4.1.2": "a package is not in the package",
    "ConnectionError: Temporary failure in name resolution": "could not be reached",
    "ERROR: [Errno 13] Permission denied: '/opt'": "VENV=... bash scripts/setup.sh",
    "ERROR: metadata-generation-failed": "pip failed",
}


@pytest.mark.parametrize("words", CAUSES)
def test_a_failure_is_named_by_its_cause(words: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"Collecting torch\n{words}\n")
    command = ["bash", "-c", 'source scripts/common.sh; why_pip_failed "$1"', "bash", str(log)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {cause for cause in CAUSES.values() if cause in said} == {CAUSES[words]}


def test_a_failure_leaves_nothing_behind(clone: Clone) -> None:
    status, output = clone.run(PIP_SAYS="OSError: [Errno 28] No space left on device")
    assert status == 1
    assert "[Errno 28]" in output
    assert "the disk is full" in output
    assert clone.run()[0] == 0


def break_interpreter(venv: Path) -> None:
    (venv / "bin/python").unlink()
    (venv / "bin/python").symlink_to("/nowhere/python3.11")


def take_pip_out(venv: Path) -> None:
    (venv / "pip").unlink()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(break_interpreter, "does not run"), (take_pip_out, "it has no pip")],
)
def test_a_broken_environment_is_made_anew(clone: Clone, spoil: object, reason: str) -> None:
    clone.run()
    (clone.venv / ".swift-grpo-ext").unlink()
    spoil(clone.venv)  # type: ignore[operator]
    status, output = clone.run()
    assert (status, clone.installs) == (0, 3)
    assert "is made anew" in output
    assert reason in output


def test_a_moved_clone_makes_its_environment_anew(clone: Clone) -> None:
    clone.run()
    (clone.folder / "clone").rename(clone.folder / "elsewhere")
    clone.folder.joinpath("clone").symlink_to("elsewhere")
    process = subprocess.run(
        ["bash", "scripts/setup.sh"],
        cwd=clone.folder / "elsewhere",
        env={"PATH": f"{clone.folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(clone.calls)},
        text=True,
        capture_output=True,
        check=True,
    )
    assert "made somewhere else" in process.stdout


def test_the_users_own_environment_is_never_removed(clone: Clone) -> None:
    own = clone.folder / "own"
    own.mkdir()
    (own / "precious").touch()
    status, output = clone.run(VENV=str(own))
    assert status == 1
    assert f"rm -rf {own}" in output
    assert (own / "precious").exists()


def test_a_file_as_environment_is_refused(clone: Clone) -> None:
    clone.venv.touch()
    assert "is a file, expected a folder" in clone.run()[1]


@pytest.mark.parametrize("seconds", [0.3, 1.5])
def test_ctrl_c_and_again(clone: Clone, seconds: float) -> None:
    process = clone.start(SLOW="yes")
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # background jobs of a shell ignore the first
    assert process.wait(30) != 0
    assert clone.run()[0] == 0
    assert clone.installs == 3


def test_a_full_disk_is_seen_before_anything_is_made(clone: Clone) -> None:
    df = clone.folder / "bin/df"
    df.write_text("#!/bin/bash\nprintf 'Filesystem\\n/dev/x 1 1 2097152 1%% /\\n'\n")
    df.chmod(0o755)
    status, output = clone.run()
    assert status == 1
    assert "has 2 GiB free, and the environment takes 5" in output
    assert not clone.venv.exists()
