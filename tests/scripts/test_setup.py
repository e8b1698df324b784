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
  "-c import sys;"*) echo VERSION ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && [ -z "$NO_PIP" ] && touch "$3/pip" ;;
  "-m pip")
    [ -e "$(dirname "$0")/../pip" ] || { echo "No module named pip"; exit 1; }
    [[ " $* " != *"+cpu "* ]] || [ -z "$NO_CPU_BUILD" ] ||
      { echo "ERROR: No matching distribution found for ${!#}"; exit 1; }
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


def free(gib: int) -> str:
    """A stand-in for `df -Pk`."""
    return f"#!/bin/bash\nprintf 'Filesystem\\n/dev/x 1 1 {gib << 20} 1%% /\\n'\n"


class Clone:
    """A folder with the script and all that it reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "clone/scripts").mkdir(parents=True)
        for name in ("setup.sh", "common.sh", "torchvision_schemas.py"):
            shutil.copy(ROOT / "scripts" / name, folder / "clone/scripts")
        for name, torch in (("", "2.13.0"), ("-3.10", "2.11.0")):
            text = f"torch=={torch}+cpu\ntriton==3.9.0\nzipp==4.1.2\n"
            (folder / f"clone/scripts/requirements-cpu{name}.txt").write_text(text)
        (folder / "clone/pyproject.toml").write_text("")
        (folder / "bin").mkdir()
        for name in ("python3.12", "python3.10", "python3"):
            self.put(name, "#!/bin/bash\necho 'command not found' >&2; exit 127\n")
        self.put("python3.11", INTERPRETER.replace("VERSION", "3.11"))
        self.put("df", free(gib=100))  # the machine's own disk may be nearly full
        self.calls = folder / "calls"

    def put(self, name: str, text: str) -> Path:
        """An executable on the PATH; a new clone has Python 3.11 there, and shims with nothing
        behind them.
        """
        file = self.folder / "bin" / name
        file.write_text(text)
        file.chmod(0o755)
        return file

    def start(self, **env: str) -> subprocess.Popen[str]:
        self.calls.write_text("")
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            **{"NO_PIP": "", "NO_CPU_BUILD": "", "SLOW": "", "PIP_SAYS": "", **env},
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
    def pip_installs(self) -> list[str]:
        """The arguments of each."""
        calls = self.calls.read_text().splitlines()
        return [call.partition(" install ")[2] for call in calls if "-m pip install" in call]

    @property
    def installs(self) -> int:
        return len(self.pip_installs)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_a_second_set_up_does_nothing(clone: Clone) -> None:
    assert clone.run()[0] == 0
    assert clone.installs == 3
    assert clone.run() == (0, "")
    assert clone.installs == 0


def stand_in(version: str) -> str:
    return INTERPRETER.replace("VERSION", version)


@pytest.mark.parametrize(
    ("version", "torch"), [("3.10", "2.11.0"), ("3.11", "2.13.0"), ("3.12", "2.13.0")]
)
def test_each_python_has_its_set(clone: Clone, version: str, torch: str) -> None:
    """The one that `BASE_PYTHON` names, whatever else is there."""
    named = clone.put("another", stand_in(version))
    assert clone.run(BASE_PYTHON=str(named))[0] == 0
    assert f"-m pip install --no-deps torch=={torch}+cpu" in clone.calls.read_text()
    listed = (clone.venv / "setup-logs/requirements.txt").read_text()
    assert listed == "triton==3.9.0\nzipp==4.1.2\n"
    assert clone.run() == (0, ""), "the environment's own Python counts"


def test_the_newest_python_that_runs_is_taken(clone: Clone) -> None:
    clone.put("python3.10", stand_in("3.10"))
    assert clone.run()[0] == 0
    assert "torch==2.13.0" in clone.calls.read_text()
    assert clone.run() == (0, "")


def test_a_python_of_another_name_is_taken(clone: Clone) -> None:
    clone.put("python3", stand_in("3.10"))
    clone.put("python3.11", stand_in("3.9"))
    assert clone.run()[0] == 0
    assert "torch==2.11.0" in clone.calls.read_text()


def test_pythons_that_cannot_be_used_are_named(clone: Clone) -> None:
    clone.put("python3.11", "#!/bin/bash\n[[ $2 == *ensurepip* ]] && exit 1; echo 3.11\n")
    clone.put("python3", stand_in("3.13"))
    status, output = clone.run()
    assert status == 1
    assert "expected Python 3.10, 3.11 or 3.12; python3.12 does not run" in output
    assert "python3.11 has no venv module" in output
    assert "apt install python3.11-venv" in output
    assert "python3 is Python 3.13. Install one, or name one" in output
    status, output = clone.run(BASE_PYTHON="/nowhere/python")
    assert "3.12 as BASE_PYTHON; /nowhere/python is not there. Install" in output
    assert not clone.venv.exists()


def test_another_python_makes_the_environment_anew(clone: Clone) -> None:
    clone.run()
    named = clone.put("another", stand_in("3.12"))
    status, output = clone.run(BASE_PYTHON=str(named))
    assert (status, clone.installs) == (0, 3)
    assert "made anew: it has Python 3.11, and Python 3.12 is wanted" in output
    assert clone.run(BASE_PYTHON=str(named)) == (0, "")


def test_without_a_cpu_build_of_torch_the_cuda_build_is_taken(clone: Clone) -> None:
    status, output = clone.run(NO_CPU_BUILD="yes")
    assert status == 0
    assert "torch==2.13.0+cpu, PyTorch's CPU build, is not in the package index" in output
    assert "PIP_EXTRA_INDEX_URL=... bash scripts/setup.sh" in output
    *_, torch, packages, _project = clone.pip_installs
    listed = ".venv/setup-logs/requirements.txt"
    assert torch == f"torch==2.13.0 --constraint {listed}"
    assert packages == f"--no-deps -r {listed}"
    assert (clone.folder / "clone" / listed).read_text() == "zipp==4.1.2\n", "no triton"


def test_an_index_that_cannot_be_reached_is_not_one_without_torch(clone: Clone) -> None:
    status, output = clone.run(PIP_SAYS=GAVE_UP)
    assert (status, clone.installs) == (1, 1)
    assert "could not be reached" in output


GAVE_UP = """WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConn
ectionError('[Errno 111] Connection refused')': /simple/torch/
ERROR: No matching distribution found for torch==2.13.0+cpu"""

CAUSES = {
    GAVE_UP: "could not be reached",
    "OSError: [Errno 28] No space left on device": "the disk is full",
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
    clone.put("df", free(gib=2))
    status, output = clone.run()
    assert status == 1
    assert "has 2 GiB free, and the environment takes 5" in output
    assert not clone.venv.exists()
