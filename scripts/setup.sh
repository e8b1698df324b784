#!/usr/bin/env bash
# Makes .venv (or what VENV names) with all that CPU runs need; does nothing where it is complete.
# Linux, Python 3.10 to 3.12; about 5 minutes and 4.3 GB. Ctrl-C is harmless: run it again.
# BASE_PYTHON names an interpreter, such as /usr/bin/python3.11; else it is the newest that runs.
# With 3.10, vLLM is 0.25.1: newer ones take 3.11 and later.
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"

stamp=$VENV/.swift-grpo-ext      # what was installed, and where; written last
made=$VENV/.swift-grpo-ext-made  # this script made the folder, and may remove it
logs=$VENV/setup-logs
mkdir -p "$(dirname "$VENV")"
here=$(cd "$(dirname "$VENV")" && pwd)/$(basename "$VENV")

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
is_tried() { [[ $1 =~ ^3\.1[0-2]$ ]]; }

install_project() {
  "$PYTHON" -m pip install --quiet --no-deps --no-build-isolation -e .
  printf '%s\n' "$PWD" >"$VENV/.swift-grpo-ext-clone"
}

# run_pip LOG ARGUMENTS...: `pip install`, with its output in LOG; shows large downloads and every 20th
# package. Not by awk: Debian's and Ubuntu's mawk reads a pipe in blocks, and shows nothing for minutes.
# Python compiles what it imports: a quarter of 33,000 files, which together take 150 s of a slow core.
run_pip() {
  local line n=0
  PYTHONUNBUFFERED=1 "$PYTHON" -m pip install --no-compile "${@:2}" 2>&1 | tee "$1" | while IFS= read -r line; do
    case $line in
      Collecting* | Processing* | Requirement*) ((++n % 20)) || printf '   %s packages\n' "$n" ;;
      *Downloading*[0-9][0-9][0-9].[0-9]\ MB*) printf '  %s\n' "$line" ;;
      Installing\ collected*) printf '   installing\n' ;;
    esac
  done
}

pip_failed() { # LOG: ends with the end of pip's log
  tail -n 5 "$1" >&2
  fail "pip failed (above; the whole log is $1). Look at the network, at PIP_INDEX_URL and proxies, and
at the disk (4.3 GB, or 7.3 with torch's CUDA build, and pip's cache), and run this again."
}

# --- which Python: the environment's own; else one that BASE_PYTHON names; else the newest ---

present=$(version_of "$PYTHON")
interpreter=$PYTHON version=$present
if [ "${BASE_PYTHON:-}" ] || ! is_tried "$present"; then
  for interpreter in ${BASE_PYTHON:-python3.12 python3.11 python3.10 python3}; do
    version=$(version_of "$interpreter")
    # Debian and Ubuntu have the module in a package of its own, python3.X-venv.
    if is_tried "$version" && "$interpreter" -c 'import ensurepip, venv' 2>/dev/null; then break; fi
    version=''
  done
  [ "$version" ] || fail "expected Python 3.10, 3.11 or 3.12 with its venv module${BASE_PYTHON:+ as BASE_PYTHON}. Install one, or name one:
BASE_PYTHON=/path/to/python3.12 bash scripts/setup.sh"
fi
requirements=scripts/requirements-cpu-$version.txt
[ -f "$requirements" ] || requirements=scripts/requirements-cpu.txt
# An environment that was moved or copied is another one.
wanted="$(cat "$requirements" pyproject.toml scripts/fix_torchvision.py | sha256sum) $here"

# --- an environment that is complete, or cannot be used ---

if [ "$present" = "$version" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  # Another clone with the same VENV, or this clone under another path: its code is meant.
  [ "$(cat "$VENV/.swift-grpo-ext-clone" 2>/dev/null)" = "$PWD" ] || install_project
  exit 0
fi
if [ -f "$made" ]; then
  if [ "$present" != "$version" ] || [[ "$(cat "$stamp" 2>/dev/null)" != *" $here" ]]; then
    step "$VENV is made anew: it is unfinished, was moved, or has another Python than $version"
    rm -rf "$VENV"
    exec bash scripts/setup.sh
  fi
elif [ -e "$VENV" ] && ! { [ "$present" = "$version" ] && "$PYTHON" -m pip --version >/dev/null; }; then
  fail "VENV $VENV is no environment with pip and Python $version, and this script did not make it:
remove it, or name another place, VENV=/other/venv bash scripts/setup.sh"
fi

# --- the installation ---

step "Setting up $VENV (once; about 5 minutes and 4.3 GB)"
if [ ! -d "$VENV" ]; then
  mkdir "$VENV"
  touch "$made"
  "$interpreter" -m venv "$VENV"
fi
mkdir -p "$logs"
torch=$(grep '^torch==' "$requirements")
others=$logs/requirements.txt
grep -v '^torch==' "$requirements" >"$others"
if ! run_pip "$logs/torch.log" --no-deps "$torch"; then
  # pip that reached no index says so as well, after its last try.
  grep -qE 'No matching distribution' "$logs/torch.log" || pip_failed "$logs/torch.log"
  ! grep -qF 'Retry(total=0,' "$logs/torch.log" || pip_failed "$logs/torch.log"
  step "$torch, PyTorch's CPU build, is not in the package index that pip uses here for Python $version"
  echo "Taking its CUDA build, which runs without a GPU too and takes 3 GB and some minutes more. To do without, name
PyTorch's own index of CPU wheels to pip: PIP_EXTRA_INDEX_URL=... bash scripts/setup.sh"
  grep -vE '^(torch|triton)==' "$requirements" >"$others" # it brings a triton of its own
  run_pip "$logs/torch.log" "${torch%+cpu}" --constraint "$others" || pip_failed "$logs/torch.log"
fi
# --no-deps: the list is complete, and two packages are left out on purpose (see its head).
run_pip "$logs/packages.log" --no-deps -r "$others" || pip_failed "$logs/packages.log"
install_project
"$PYTHON" scripts/fix_torchvision.py
"$PYTHON" -c 'import swift, torchvision, vllm, swift_grpo_ext'
printf '%s\n' "$wanted" >"$stamp"
