#!/usr/bin/env bash
# Makes .venv (or the folder that VENV names) for CPU runs: Linux, Python 3.10 to 3.12. It does nothing
# where the environment is complete. Ctrl-C is harmless: run it again.
#   bash scripts/setup.sh            what the demo needs
#   bash scripts/setup.sh --tests    what the tests need too
# BASE_PYTHON names an interpreter, such as /usr/bin/python3.11; else the newest of the three is taken.
# With Python 3.10, vLLM is 0.25.1: newer ones need 3.11.
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"

made=$VENV/.swift-grpo-ext-made  # this script made the folder, and may remove it
logs=$VENV/setup-logs
mkdir -p "$(dirname "$VENV")"
here=$(cd "$(dirname "$VENV")" && pwd)/$(basename "$VENV")

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
is_tried() { [[ $1 =~ ^3\.1[0-2]$ ]]; }

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
# Not that of an environment, which may be removed below.
interpreter=$("$interpreter" -c 'import sys; print(sys._base_executable)')
list=scripts/requirements-cpu-$version.txt
[ -f "$list" ] || list=scripts/requirements-cpu.txt

# --- which lists are not installed yet: each has a stamp, which is written last ---

# An environment that was moved or copied is another one.
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
  # Another clone with the same VENV, or this clone under another path: its code is meant.
  [ "$(cat "$VENV/.swift-grpo-ext-clone" 2>/dev/null)" = "$PWD" ] || install_project
  exit 0
fi
if [ "${missing[0]}" = "$list" ] && [ -f "$made" ]; then
  step "$VENV is unfinished or out of date: it is made again"
  rm -rf "$VENV"
elif [ -e "$VENV" ] && ! { [ "$present" = "$version" ] && "$PYTHON" -m pip --version >/dev/null; }; then
  fail "VENV $VENV is no environment with pip and Python $version, and this script did not make it:
remove it, or name another place, VENV=/other/venv bash scripts/setup.sh"
fi

# --- the installation: by uv, which is three times as fast as pip; by pip where uv cannot ---

uv() { # REQUIREMENTS ARGUMENTS...
  env "${uv_settings[@]}" "$VENV/bin/uv" pip install --python "$PYTHON" --index-strategy unsafe-best-match -r "$@"
}
# Whether uv finds each package of the list; `num_missing` of them are not in its cache.
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
    # The package index has torch's CUDA build alone. PyTorch's own index has the CPU build.
    arguments=(--torch-backend cpu)
    if ! plan "${arguments[@]}"; then
      echo "PyTorch's index of CPU builds cannot be reached: the CUDA build is taken, which runs without a GPU too and
takes 3 GB more. To do without, name an index that has it: PIP_EXTRA_INDEX_URL=... bash scripts/setup.sh"
      arguments=()
      sed -i 's/+cpu$//' "$all"
      grep '^torch==' "$all" >"$logs/torch.txt"
      # With what it depends on, which a CPU build does without.
      follow "$logs/uv.log" "downloading torch's CUDA build" true uv "$logs/torch.txt" -c "$all" || return 1
      plan || return 1
    fi
  fi
  mkdir -p "$cache"
  follow "$logs/uv.log" 'downloading packages' unpacked uv "$all" --no-deps "${arguments[@]}"
}

with_pip() {
  follow "$logs/pip.log" 'pip looks for packages, then installs them' collected \
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
# The lists are complete, and leave three packages out on purpose (their heads): --no-deps.
cat "${missing[@]}" | grep -v '^#' >"$all"
if ! with_uv; then
  tail -n 3 "$logs/plan.log" "$logs/uv.log" 2>/dev/null || true
  step "uv failed (above): pip takes its place"
  with_pip || {
    tail -n 5 "$logs/pip.log" >&2
    fail "pip failed too (above; the whole log is $logs/pip.log). Look at the network, at PIP_INDEX_URL and
proxies, and at the disk (3 GB, and 3 more for uv's cache), and run this again. Where the index has no CPU build of torch,
name one that has it: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu bash scripts/setup.sh"
  }
fi
if [ "${missing[0]}" = "$list" ]; then
  install_project
  prepare() { "$PYTHON" scripts/fix_torchvision.py && "$PYTHON" -c 'import swift, torchvision, vllm, swift_grpo_ext'; }
  follow "$logs/import.log" 'first import: Python compiles ms-swift, vLLM and torch' true prepare ||
    { tail -n 25 "$logs/import.log" >&2; fail "the packages cannot be imported (above)"; }
fi
for list in "${missing[@]}"; do wanted "$list" >"$VENV/.swift-grpo-ext-$(basename "$list")"; done
