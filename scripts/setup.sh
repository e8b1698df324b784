#!/usr/bin/env bash
# Makes an environment for CPU runs (Linux, Python 3.10 to 3.12) in .venv, or in the folder that VENV
# names. A complete environment stays as it is. After Ctrl-C, run the script again.
#   bash scripts/setup.sh            installs what the demo needs
#   bash scripts/setup.sh --tests    also installs what the tests need
# BASE_PYTHON names an interpreter, such as /usr/bin/python3.11; the default is the newest of the three.
# Python 3.10 gets vLLM 0.25.1, because newer releases need 3.11.
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"

made=$VENV/.swift-grpo-ext-made  # marks a folder that this script made and may remove
logs=$VENV/setup-logs
mkdir -p "$(dirname "$VENV")"
here=$(cd "$(dirname "$VENV")" && pwd)/$(basename "$VENV")

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
is_supported() { [[ $1 =~ ^3\.1[0-2]$ ]]; }

# --- choose Python: the environment's own, else BASE_PYTHON, else the newest ---

present=$(version_of "$PYTHON")
interpreter=$PYTHON version=$present
if [ "${BASE_PYTHON:-}" ] || ! is_supported "$present"; then
  for interpreter in ${BASE_PYTHON:-python3.12 python3.11 python3.10 python3}; do
    version=$(version_of "$interpreter")
    # Debian and Ubuntu put these modules into a separate package, python3.X-venv.
    if is_supported "$version" && "$interpreter" -c 'import ensurepip, venv' 2>/dev/null; then break; fi
    version=''
  done
  [ "$version" ] || fail "expected Python 3.10, 3.11 or 3.12 with its venv module${BASE_PYTHON:+ as BASE_PYTHON}. Install it, or name an interpreter:
BASE_PYTHON=/path/to/python3.12 bash scripts/setup.sh"
fi
# Use the interpreter behind an environment: the environment itself may be removed below.
interpreter=$("$interpreter" -c 'import sys; print(sys._base_executable)')
list=scripts/requirements-cpu-$version.txt
[ -f "$list" ] || list=scripts/requirements-cpu.txt

# --- find the lists that are not installed yet: an installed list has a stamp, written last ---

# The stamp includes the path, because an environment that was moved or copied does not work.
wanted() { echo "$(cat "$1" pyproject.toml scripts/fix_torchvision.py | sha256sum) $here"; }
is_installed() { [ "$(cat "$VENV/.swift-grpo-ext-$(basename "$1")" 2>/dev/null)" = "$(wanted "$1")" ]; }
missing=()
if [ "$present" != "$version" ] || ! is_installed "$list"; then missing+=("$list"); fi
if [ "${1:-}" = --tests ] && ! is_installed scripts/requirements-tests.txt; then
  missing+=(scripts/requirements-tests.txt)
fi

install_project() {
  "$PYTHON" -m pip install --quiet --no-deps --no-build-isolation -e .
  printf '%s\n' "$PWD" >"$VENV/.swift-grpo-ext-clone"
}

if ! ((${#missing[@]})); then
  # The environment may hold the code of another clone, or of this clone under its earlier path.
  [ "$(cat "$VENV/.swift-grpo-ext-clone" 2>/dev/null)" = "$PWD" ] || install_project
  exit 0
fi
if [ "${missing[0]}" = "$list" ] && [ -f "$made" ]; then
  step "Removing $VENV, which is incomplete or out of date"
  rm -rf "$VENV"
elif [ -e "$VENV" ] && ! { [ "$present" = "$version" ] && "$PYTHON" -m pip --version >/dev/null; }; then
  fail "VENV: $VENV is not an environment with pip and Python $version, and this script did not make it.
Remove it, or name another folder: VENV=/other/venv bash scripts/setup.sh"
fi

# --- install with uv, which is three times as fast as pip; with pip if uv fails ---

uv() { # REQUIREMENTS ARGUMENTS...
  env "${uv_settings[@]}" "$VENV/bin/uv" pip install --python "$PYTHON" --index-strategy unsafe-best-match -r "$@"
}
# Fails unless uv finds each package of the list; sets `num_missing` to the number of packages that are
# not in uv's cache.
plan() { # ARGUMENTS...
  uv "$all" --no-deps --dry-run "$@" >"$logs/plan.log" 2>&1 || return 1
  num_missing=$(sed -n 's/^Would download \([0-9]*\) .*/\1/p' "$logs/plan.log")
}
unpacked() { [ -z "$num_missing" ] || echo ", $(find "$cache" -mindepth 1 -maxdepth 1 -newer "$logs/plan.log" | wc -l) of $num_missing"; }
collected() { echo ", $(grep -cE '^(Collecting|Processing|Requirement)' "$logs/pip.log") of $(wc -l <"$all")"; }

with_uv() {
  local arguments=()
  "$PYTHON" -m pip install --quiet "$(grep '^uv==' "$list")" >"$logs/uv.log" 2>&1 || return 1
  mapfile -t uv_settings < <("$PYTHON" scripts/uv_settings.py)
  cache=$("$VENV/bin/uv" cache dir)/archive-v0
  if ! plan; then
    grep -q 'no version of torch==' "$logs/plan.log" || return 1
    # The package index has only torch's CUDA build. PyTorch's own index has the CPU build.
    arguments=(--torch-backend cpu)
    if ! plan "${arguments[@]}"; then
      echo "PyTorch's index of CPU builds cannot be reached, so the CUDA build is installed: it runs without a GPU too but
needs 3 GB more. To avoid it, name an index with the CPU build: PIP_EXTRA_INDEX_URL=... bash scripts/setup.sh"
      arguments=()
      sed -i 's/+cpu$//' "$all"
      grep '^torch==' "$all" >"$logs/torch.txt"
      # Unlike the CPU build, the CUDA build needs its own dependencies.
      follow "$logs/uv.log" "downloading torch's CUDA build" true uv "$logs/torch.txt" -c "$all" || return 1
      plan || return 1
    fi
  fi
  mkdir -p "$cache"
  follow "$logs/uv.log" 'downloading packages' unpacked uv "$all" --no-deps "${arguments[@]}"
}

with_pip() {
  follow "$logs/pip.log" 'pip finds and installs packages' collected \
    "$PYTHON" -m pip install --no-compile --no-deps -r "$all"
}

step "Setting up $VENV (once; ${missing[*]})"
if [ ! -d "$VENV" ]; then
  mkdir "$VENV"
  touch "$made"
  "$interpreter" -m venv "$VENV"
fi
mkdir -p "$logs"
all=$logs/requirements.txt
# --no-deps: the lists are complete and leave out some packages on purpose (see their heads).
cat "${missing[@]}" | grep -v '^#' >"$all"
if ! with_uv; then
  tail -n 3 "$logs/plan.log" "$logs/uv.log" 2>/dev/null || true
  step "uv failed (see above); installing with pip"
  with_pip || {
    tail -n 5 "$logs/pip.log" >&2
    fail "pip failed too (see above; the whole log is $logs/pip.log). Check the network, PIP_INDEX_URL, proxies and
the disk (3 GB, and 3 more for uv's cache), then run this again. If the index has no CPU build of torch, name one that has:
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu bash scripts/setup.sh"
  }
fi
if [ "${missing[0]}" = "$list" ]; then
  install_project
  prepare() { "$PYTHON" scripts/fix_torchvision.py && "$PYTHON" -c 'import swift, torchvision, vllm, swift_grpo_ext'; }
  follow "$logs/import.log" 'first import: Python compiles ms-swift, vLLM and torch' true prepare ||
    { tail -n 25 "$logs/import.log" >&2; fail "the packages cannot be imported (see above)"; }
fi
for list in "${missing[@]}"; do wanted "$list" >"$VENV/.swift-grpo-ext-$(basename "$list")"; done
