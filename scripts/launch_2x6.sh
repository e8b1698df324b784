#!/usr/bin/env bash
# Launches 2 rollout GPUs and 6 training GPUs: Qwen2.5-VL-7B with LoRA unless you name another CONFIG.
#   bash scripts/launch_2x6.sh --dataset train.jsonl
#   bash scripts/launch_2x6.sh --dataset train.jsonl examples/presets/server_2x6_full
#   bash scripts/launch_2x6.sh --cpu    without GPUs: the tiny model, 2 replicas, 6 ranks, 3 steps
exec bash "$(dirname "$0")/launch.sh" --rollout-gpus 0,1 --train-gpus 2-7 "$@"
