#!/usr/bin/env bash
# Makes .venv (or what VENV names) with all that CPU runs need; does nothing where it is complete.
# Linux, Python 3.11; about 4 minutes and 4.3 GB.
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"

requirements=scripts/requirements-cpu.txt
stamp=$VENV/.swift-grpo-ext
wanted=$(cat "$requirements" pyproject.toml scripts/torchvision_schemas.py scripts/setup.sh | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  exit 0
fi

interpreter=$(command -v python3.11 || command -v python3 || true)
[ -n "$interpreter" ] || fail "python3 is not on the PATH; install Python 3.11"
version=$("$interpreter" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$version" = 3.11 ] || printf 'warning: the pinned set was tested with Python 3.11, this is %s\n' "$version"

step "Setting up $VENV (once; about 4 minutes and 4.3 GB)"
[ -x "$PYTHON" ] || "$interpreter" -m venv "$VENV"
logs=$VENV/setup-logs
mkdir -p "$logs"

torch=$(grep '^torch==' "$requirements")
if ! "$PYTHON" -m pip install --no-deps "$torch" >"$logs/torch.log" 2>&1; then
  tail -n 3 "$logs/torch.log" >&2
  fail "$torch, PyTorch's CPU build, is not in the package index that pip uses here. Name PyTorch's
own index of CPU wheels to pip and run this again: PIP_EXTRA_INDEX_URL=... bash scripts/setup.sh"
fi
# --no-deps: the list is complete, and two packages are left out on purpose (see its head).
total=$(grep -c '==' "$requirements")
pip_install "$logs/packages.log" "$total" --no-deps -r "$requirements"
"$PYTHON" -m pip install --quiet --no-deps --no-build-isolation -e .
"$PYTHON" scripts/fix_torchvision.py
"$PYTHON" -c 'import swift, torchvision, vllm, swift_grpo_ext'
printf '%s\n' "$wanted" >"$stamp"
