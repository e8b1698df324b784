#!/usr/bin/env bash
# Sets up the environment, then runs lint, types and tests.
#   bash scripts/test.sh                   unit tests, and a few real trainings and servers
#   bash scripts/test.sh --core            unit tests, each promise on real processes, and a tenth of
#                                          tests/extra, by the number of commits (CI)
#   bash scripts/test.sh --all             all tests
#   bash scripts/test.sh tests/fast        other arguments go to pytest
#   bash scripts/test.sh --all --durations 20    prints the 20 slowest tests at the end
#   bash scripts/test.sh --stack 4.6.0-0.23.0    tests another ms-swift and vLLM (compatibility.py)
bash "$(dirname "$0")/setup.sh" --tests
# shellcheck source=scripts/common.sh
source "$(dirname "$0")/common.sh"
bin=$(cd "$VENV/bin" && pwd)
export PATH=$bin:$PATH ASSETS
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the tests run in parallel

step "Lint and types"
ruff check .
ruff format --check .
follow "$VENV/mypy.log" 'mypy, half a minute' true mypy || { cat "$VENV/mypy.log"; exit 1; }
make_assets
step "Tests (each worker imports torch, ms-swift and vLLM first)"
units=(tests/fast tests/unit)
case "${1:-}" in
  --stack) shift && exec python scripts/compatibility.py --cells "$@" ;;
  "") set -- "${units[@]}" \
    'tests/stack/test_training.py::test_engine_samples_with_the_trained_weights[learned_full]' \
    tests/stack/test_training.py::test_killed_and_resumed \
    tests/stack/test_tool_call.py ;;
  --core) set -- "${units[@]}" tests/stack tests/extra \
    --extra-shard "$(git rev-list --count HEAD 2>/dev/null || echo 0)" "${@:2}" ;;
  --all) set -- "${units[@]}" tests/stack tests/extra "${@:2}" ;;
esac
exec python -m pytest -n "${WORKERS:-3}" --max-worker-restart 0 --dist loadfile --no-loadscope-reorder \
  --disable-warnings "$@"
