#!/usr/bin/env bash
# Eight GPUs, of which 2 deploy and 6 train: Qwen2.5-VL-7B with LoRA, unless another CONFIG is named.
#   bash scripts/launch_2x6.sh --dataset train.jsonl
#   bash scripts/launch_2x6.sh --dataset train.jsonl examples/presets/server_2x6_full
#   bash scripts/launch_2x6.sh --cpu    no GPUs: the tiny model, 2 replicas, 6 ranks, 3 steps
exec bash "$(dirname "$0")/launch.sh" --rollout-gpus 0,1 --train-gpus 2-7 "$@"
