#!/usr/bin/env bash
# What a GPU says: values, gradients, times and peaks of the training passes, in under 8 minutes.
#   bash scripts/gpu.sh                     writes output/gpu/gpu.json and gpu.md
#   bash scripts/gpu.sh --output DIR        elsewhere; --minutes 4: leaves out what does not fit
# It needs torch, transformers and peft, and neither ms-swift nor vLLM nor a network. PYTHON names another
# interpreter. Without a GPU the sizes are small.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE NVIDIA_TF32_OVERRIDE # which NVIDIA's images set: float32 is meant
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8} # which torch reads with the first product
export HF_HUB_OFFLINE=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-python3}" -m scripts.gpu "$@"
