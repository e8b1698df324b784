#!/usr/bin/env bash
# Lint, types and tests; sets up what it needs. Arguments go to pytest:
#   bash scripts/test.sh -m "not stack"    the unit tests, about a minute
bash "$(dirname "$0")/setup.sh"
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"
bin=$(cd "$VENV/bin" && pwd)
export PATH=$bin:$PATH ASSETS
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # tests run side by side

step "Lint and types"
ruff check .
ruff format --check .
mypy
step "Tiny model and data"
make_assets
step "Tests"
exec python -m pytest -n "${WORKERS:-3}" --dist loadfile --no-loadscope-reorder "$@"
