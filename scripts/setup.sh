#!/usr/bin/env bash
# Makes .venv (or what VENV names) with all that CPU runs need; does nothing where it is complete.
# Linux, Python 3.11; about 3 minutes and 4.3 GB. Ctrl-C is harmless: run it again.
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"

requirements=scripts/requirements-cpu.txt
stamp=$VENV/.swift-grpo-ext            # what was installed, and where; written last
made=$VENV/.swift-grpo-ext-made        # this script made the folder, and may remove it
unfinished=$VENV/.swift-grpo-ext-unfinished
needed_gib=5

install_project() {
  "$PYTHON" -m pip install --quiet --no-deps --no-build-isolation -e .
  printf '%s\n' "$PWD" >"$VENV/.swift-grpo-ext-clone"
}

mkdir -p "$(dirname "$VENV")"
here=$(cd "$(dirname "$VENV")" && pwd)/$(basename "$VENV")
wanted=$(cat "$requirements" pyproject.toml scripts/torchvision_schemas.py | sha256sum)
wanted="$wanted $here"                 # an environment that was moved or copied is another one
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$PYTHON" -c '' 2>/dev/null; then
  # Another clone with the same VENV, or this clone under another path: its code is meant.
  [ "$(cat "$VENV/.swift-grpo-ext-clone" 2>/dev/null)" = "$PWD" ] || install_project
  exit 0
fi

# --- what a set-up rests on ---

interpreter=$(command -v python3.11 || command -v python3 || true)
[ -n "$interpreter" ] || fail "python3 is not on the PATH; install Python 3.11"
version=$("$interpreter" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
  fail "$interpreter does not run; install Python 3.11"
[ "$version" = 3.11 ] || printf 'warning: the pinned set was tested with Python 3.11, this is %s\n' "$version"
"$interpreter" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "$interpreter has no venv module; install it (Debian and Ubuntu: apt install python$version-venv)"
[ ! -e "$VENV" ] || [ -d "$VENV" ] || fail "VENV $VENV is a file, expected a folder; name another one"

free_gib=$(($(df -Pk "$(dirname "$here")" | awk 'NR == 2 {print $4}') / 1024 / 1024))
if [ ! -f "$stamp" ] && ((free_gib < needed_gib)); then
  fail "$(dirname "$here") has $free_gib GiB free, and the environment takes $needed_gib: make room, or name
another place: VENV=/other/disk/venv bash scripts/setup.sh"
fi

# --- an environment that is broken, half made, or from somewhere else ---

why=''
if [ -d "$VENV" ]; then
  if [ -f "$unfinished" ] && [ -f "$made" ]; then
    why='its set-up was interrupted'
  elif ! "$PYTHON" -c '' 2>/dev/null; then
    why="its interpreter $PYTHON does not run"
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
pip_install "$logs/torch.log" 1 --no-deps "$torch"
# --no-deps: the list is complete, and two packages are left out on purpose (see its head).
total=$(grep -c '==' "$requirements")
pip_install "$logs/packages.log" "$total" --no-deps -r "$requirements"
install_project
"$PYTHON" scripts/fix_torchvision.py
"$PYTHON" -c 'import swift, torchvision, vllm, swift_grpo_ext'
printf '%s\n' "$wanted" >"$stamp"
rm -f "$unfinished"
