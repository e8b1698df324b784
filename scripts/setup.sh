#!/usr/bin/env bash
# Makes .venv (or what VENV names) with all that CPU runs need; does nothing where it is complete.
# Linux, Python 3.10 to 3.12; about 3 minutes and 4.3 GB. Ctrl-C is harmless: run it again.
# BASE_PYTHON names an interpreter, such as /usr/bin/python3.11; else it is the newest that runs.
# With 3.10, vLLM is 0.25.1: newer ones take 3.11 and later.
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"

stamp=$VENV/.swift-grpo-ext            # what was installed, and where; written last
made=$VENV/.swift-grpo-ext-made        # this script made the folder, and may remove it
unfinished=$VENV/.swift-grpo-ext-unfinished

install_project() {
  "$PYTHON" -m pip install --quiet --no-deps --no-build-isolation -e .
  printf '%s\n' "$PWD" >"$VENV/.swift-grpo-ext-clone"
}

need_gib() { # NUMBER: of free space, before anything is installed
  local free_gib
  free_gib=$(($(df -Pk "$(dirname "$here")" | awk 'NR == 2 {print $4}') / 1024 / 1024))
  [ -f "$stamp" ] || ((free_gib >= $1)) ||
    fail "$(dirname "$here") has $free_gib GiB free, and the environment takes $1: make room, or name
another place: VENV=/other/disk/venv bash scripts/setup.sh"
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
is_tried() { [[ $1 =~ ^3\.1[0-2]$ ]]; }

# choose_interpreter: sets `interpreter` and `version`.
choose_interpreter() {
  local found='' candidates=(python3.12 python3.11 python3.10 python3)
  [ -z "${BASE_PYTHON:-}" ] || candidates=("$BASE_PYTHON")
  for interpreter in "${candidates[@]}"; do
    version=$(version_of "$interpreter") || version='' # a shim may have nothing behind it
    if ! command -v "$interpreter" >/dev/null; then
      found+=", $interpreter is not there"
    elif [ -z "$version" ]; then
      found+=", $interpreter does not run"
    elif ! is_tried "$version"; then
      found+=", $interpreter is Python $version"
    elif ! "$interpreter" -c 'import ensurepip, venv' 2>/dev/null; then
      found+=", $interpreter has no venv module (Debian and Ubuntu: apt install python$version-venv)"
    else
      return 0
    fi
  done
  fail "expected Python 3.10, 3.11 or 3.12${BASE_PYTHON:+ as BASE_PYTHON}; ${found#, }. Install one, or name one:
BASE_PYTHON=/path/to/python3.12 bash scripts/setup.sh"
}

# plan: what to install with which Python: the environment's own, where it has one that runs.
plan() {
  present=$(version_of "$PYTHON") || present=''
  interpreter=$PYTHON version=$present
  if [ "${BASE_PYTHON:-}" ] || ! is_tried "$present"; then choose_interpreter; fi
  requirements=scripts/requirements-cpu-$version.txt
  [ -f "$requirements" ] || requirements=scripts/requirements-cpu.txt
  wanted=$(cat "$requirements" pyproject.toml scripts/torchvision_schemas.py | sha256sum)
  wanted="$wanted $here"               # an environment that was moved or copied is another one
}

mkdir -p "$(dirname "$VENV")"
here=$(cd "$(dirname "$VENV")" && pwd)/$(basename "$VENV")
plan
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ "$present" = "$version" ]; then
  # Another clone with the same VENV, or this clone under another path: its code is meant.
  [ "$(cat "$VENV/.swift-grpo-ext-clone" 2>/dev/null)" = "$PWD" ] || install_project
  exit 0
fi
[ ! -e "$VENV" ] || [ -d "$VENV" ] || fail "VENV $VENV is a file, expected a folder; name another one"
need_gib 5

# --- an environment that is broken, half made, or from somewhere else ---

why=''
if [ -d "$VENV" ]; then
  if [ -f "$unfinished" ] && [ -f "$made" ]; then
    why='its set-up was interrupted'
  elif [ -z "$present" ]; then
    why="its interpreter $PYTHON does not run"
  elif [ "$present" != "$version" ]; then
    why="it has Python $present, and Python $version is wanted"
  elif ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
    why='it has no pip'
  elif [ -f "$stamp" ] && [[ "$(cat "$stamp")" != *" $here" ]]; then
    why='it was made somewhere else, and moved or copied here'
  fi
fi
if [ "$why" ]; then
  if [ -f "$made" ] || [ "$here" = "$PWD/.venv" ]; then
    step "$VENV is made anew: $why"
    rm -rf "$VENV"
    plan
  else
    fail "VENV $VENV cannot be used: $why. This script did not make it; remove it and run this again:
rm -rf $VENV"
  fi
fi

# --- the installation ---

step "Setting up $VENV (once; about 3 minutes and 4.3 GB)"
if [ ! -d "$VENV" ]; then
  mkdir "$VENV"
  touch "$made"
fi
touch "$unfinished"
logs=$VENV/setup-logs
[ -x "$PYTHON" ] || "$interpreter" -m venv "$VENV" || fail "$interpreter -m venv $VENV failed (above)"
mkdir -p "$logs"

torch=$(grep '^torch==' "$requirements")
others=$logs/requirements.txt
grep -v '^torch==' "$requirements" >"$others"
if ! run_pip "$logs/torch.log" 1 --no-deps "$torch"; then
  [ "$(why_pip_failed "$logs/torch.log")" = "$not_in_index" ] || explain "$logs/torch.log"
  step "$torch, PyTorch's CPU build, is not in the package index that pip uses here for Python $version"
  echo "Taking its CUDA build, which runs without a GPU too and takes 3 GB and some minutes more. To do without, name
PyTorch's own index of CPU wheels to pip: PIP_EXTRA_INDEX_URL=... bash scripts/setup.sh"
  need_gib 8
  grep -vE '^(torch|triton)==' "$requirements" >"$others" # it brings a triton of its own
  pip_install "$logs/torch.log" 30 "${torch%+cpu}" --constraint "$others"
fi
# --no-deps: the list is complete, and two packages are left out on purpose (see its head).
pip_install "$logs/packages.log" "$(grep -c '==' "$others")" --no-deps -r "$others"
install_project
"$PYTHON" scripts/fix_torchvision.py
"$PYTHON" -c 'import swift, torchvision, vllm, swift_grpo_ext'
printf '%s\n' "$wanted" >"$stamp"
rm -f "$unfinished"
