#!/usr/bin/env bash
# Eight GPUs, of which 2 deploy and 6 train: Qwen2.5-VL-7B with LoRA, unless another CONFIG is named.
#   bash scripts/launch_2x6.sh --dataset train.jsonl
#   bash scripts/launch_2x6.sh --dataset train.jsonl examples/presets/server_2x6_full
#   bash scripts/launch_2x6.sh --cpu    no GPUs: the tiny model, 2 replicas, 6 ranks, 3 steps
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)

options=(--root "$root") config=()
[[ " $* " == *" --cpu "* ]] || config=(examples/presets/server_2x6_lora)
while (($#)); do
  case $1 in
    --) break ;;
    --cpu | --dry-run | -h | --help) options+=("$1"); shift ;;
    -*) options+=("${@:1:2}"); shift $(($# > 1 ? 2 : 1)) ;;
    *) config=("$1"); shift ;;
  esac
done
exec bash "$root/scripts/launch.sh" --rollout-gpus 0,1 --train-gpus 2-7 "${options[@]}" "${config[@]}" "$@"
