#!/usr/bin/env bash
# Starts rollout servers, waits until they are healthy, starts the training and follows all logs. At the
# end, on an error and on Ctrl-C it stops every process. `--help` lists the options.
set -euo pipefail
{ # bash reads the whole block before it runs, so the file may change during a training of days

usage() {
  cat <<'HELP'
launch.sh [OPTIONS] CONFIG [-- ARGUMENTS OF swift rlhf]

CONFIG names two files, CONFIG.rollout.yaml for `swift rollout` and CONFIG.train.yaml for
`swift rlhf`. The default is examples/presets/server_2x6_lora, which exists in a clone.

  --rollout-gpus LIST   GPUs of the servers, e.g. 0,1 or 0-3 (default 0,1)
  --train-gpus LIST     GPUs of the training, one rank on each (default 2-7)
  --servers N           servers on a node, which share its rollout GPUs (default 1); a server has
                        one replica for each vllm_tensor_parallel_size GPUs
  --model NAME          replaces the model of CONFIG on both sides
  --dataset NAME        replaces the dataset of CONFIG
  --port N              port of the first server; the next servers use the next ports (default 8000)
  --group-port N        port for sending weights to the first server, counted up likewise
                        (default 51216)
  --wait SECONDS        how long to wait for healthy servers (default 900)
  --logs DIR            folder of the logs (default output/launch-TIME)
  --dry-run             print the commands and start nothing
  --cpu                 run without GPUs: one replica or rank for each number in the lists. A clone
                        of the project sets itself up and uses the tiny model and the digits;
                        elsewhere, give --model and --dataset

To use several nodes, run the same command on each of them:
  --rollout-nodes N     the first N nodes serve with --rollout-gpus, the others train with
                        --train-gpus; --logs must be on a disk that all nodes share
  --hosts A,B,...       all nodes in order
  --node-rank I         the position of this node in --hosts, from 0. Slurm provides both:
                        srun --ntasks-per-node 1 launch.sh --rollout-nodes 2 ... CONFIG
MASTER_PORT is torchrun's port on the first training node (default 29500; on one node a free port).
If VLLM_API_KEY is set (on all nodes), the servers require this key and the training sends it.

The exit status is that of the training, 1 if a server fails, and 130 after Ctrl-C.
HELP
}

say() { printf '[launch] %s\n' "$*"; }
fail() { printf '[launch] error: %s\n' "$*" >&2; exit 1; }

# expand LIST: prints 0,2-4 as 0 2 3 4.
expand() {
  local part i
  for part in ${1//,/ }; do
    for ((i = ${part%-*}; i <= ${part#*-}; i++)); do printf '%s ' "$i"; done
  done
}

join() { local IFS=,; printf '%s' "$*"; }

# --- options ---

rollout_gpus=0,1 train_gpus=2-7 num_servers=1 port=8000 group_port=51216 wait_seconds=900
config='' model_option=() dataset_option=() logs='' dry_run='' cpu='' rollout_nodes=0 hosts='' node='' training_options=()
while (($#)); do
  case $1 in
    --dry-run) dry_run=yes; shift; continue ;;
    --cpu) cpu=yes; shift; continue ;;
    -h | --help) usage; exit 0 ;;
    --) shift; training_options=("$@"); break ;;
    -*) (($# > 1)) || fail "$1 needs a value" ;;
    *) config=$1; shift; continue ;;
  esac
  case $1 in
    --rollout-gpus) rollout_gpus=$2 ;;
    --train-gpus) train_gpus=$2 ;;
    --servers) num_servers=$2 ;;
    --model) model_option=(--model "$2") ;;
    --dataset) dataset_option=(--dataset "$2") ;;
    --port) port=$2 ;;
    --group-port) group_port=$2 ;;
    --wait) wait_seconds=$2 ;;
    --logs) logs=$2 ;;
    --rollout-nodes) rollout_nodes=$2 ;;
    --hosts) hosts=$2 ;;
    --node-rank) node=$2 ;;
    *) fail "unknown option $1; launch.sh --help lists them" ;;
  esac
  shift 2
done
read -ra rollout_gpus <<<"$(expand "$rollout_gpus")"
read -ra train_gpus <<<"$(expand "$train_gpus")"

if [ "$cpu" ]; then
  here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
  if [ -f "$here/common.sh" ]; then
    [ "$dry_run" ] || bash "$here/setup.sh"
    # shellcheck source=scripts/common.sh
    source "$here/common.sh" # also changes to the clone's folder
    [ "$dry_run" ] || make_assets
    PATH=$(cd "$VENV/bin" && pwd):$PATH
    export PATH
    config=${config:-examples/presets/cpu_2x6}
    ((${#model_option[@]})) || model_option=(--model "$ASSETS/tiny_vlm")
    ((${#dataset_option[@]})) || dataset_option=(--dataset "$ASSETS/digits/train.jsonl")
  elif ! ((${#model_option[@]} && ${#dataset_option[@]})); then
    fail "--cpu: there is no tiny model outside a clone of the project. Give --model and --dataset"
  fi
  export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE
fi
config=${config:-examples/presets/server_2x6_lora}
for side in rollout train; do
  [ -f "$config.$side.yaml" ] || fail "there is no file $config.$side.yaml; launch.sh --help explains CONFIG"
done
[[ ${VLLM_API_KEY:-} =~ ^[A-Za-z0-9._~+/=-]*$ ]] ||
  fail "VLLM_API_KEY: expected only letters, digits and ._~+/=-. Make a key with openssl rand -hex 32"
command -v swift-grpo-ext >/dev/null ||
  fail "swift-grpo-ext is not on the PATH. Activate the environment that contains it and ms-swift," \
    "for example with source .venv/bin/activate"

# --- this node ---

if ((rollout_nodes)); then
  if [ -z "$hosts" ]; then
    [ "${SLURM_JOB_NODELIST:-}" ] || fail "--rollout-nodes needs --hosts and --node-rank, or Slurm"
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
    node=${SLURM_NODEID:?start launch.sh with srun, once on each node}
    logs=${logs:-output/launch-$SLURM_JOB_ID}
  fi
  [ "$node" ] || fail "--node-rank is missing"
  [ "$logs" ] || fail "--logs is missing: name a folder that all nodes share"
  IFS=, read -ra nodes <<<"$hosts"
  ((rollout_nodes < ${#nodes[@]})) || fail "--rollout-nodes $rollout_nodes leaves none of $hosts to train"
  server_hosts=("${nodes[@]:0:rollout_nodes}") master=${nodes[rollout_nodes]} bind=0.0.0.0
  num_training_nodes=$((${#nodes[@]} - rollout_nodes)) training_node=$((node - rollout_nodes))
  serves=$((node < rollout_nodes)) trains=$((node >= rollout_nodes))
else
  logs=${logs:-output/launch-$(date +%Y%m%d-%H%M%S)-$$}
  server_hosts=(127.0.0.1) bind=127.0.0.1 node=0 serves=1 trains=1 num_training_nodes=1 training_node=0
  for gpu in "${rollout_gpus[@]}"; do
    [[ $cpu || " ${train_gpus[*]} " != *" $gpu "* ]] || fail "GPU $gpu is in both --rollout-gpus and --train-gpus"
  done
fi

# --- the commands ---

tensor_parallel=$(sed -nE 's/^vllm_tensor_parallel_size: *([0-9]+).*/\1/p' "$config.rollout.yaml")
tensor_parallel=${tensor_parallel:-1}
gpus_of_server=$((${#rollout_gpus[@]} / num_servers))
replicas=$((gpus_of_server / tensor_parallel))
((replicas > 0 && replicas * tensor_parallel * num_servers == ${#rollout_gpus[@]})) ||
  fail "--rollout-gpus ${rollout_gpus[*]} cannot be shared evenly by $num_servers server(s) of replicas with" \
    "$tensor_parallel GPU(s) each (vllm_tensor_parallel_size in $config.rollout.yaml)"

# Servers get the training's model where their own file names none.
model=()
for name in model model_type template; do
  value=$(sed -nE "s/^$name: *['\"]?([^'\"# ]+).*/\1/p" "$config.train.yaml")
  [ -z "$value" ] || grep -q "^$name:" "$config.rollout.yaml" || model+=("--$name" "$value")
done

listens() { # PORT: looks in /proc/net/tcp, where state 0A means listening
  grep -qsE "^ *[0-9]+: [0-9A-F]+:$(printf '%04X' "$1") [0-9A-F:]+ 0A " /proc/net/tcp /proc/net/tcp6
}

free_port() { # for torchrun: another training may use its default port
  local free=29500
  while listens "$free"; do free=$((free + 1)); done
  printf '%s' "$free"
}

server_command() { # NUMBER
  local gpus=''
  [ "$cpu" ] || gpus=$(join "${rollout_gpus[@]:$1 * gpus_of_server:gpus_of_server}")
  # With these variables, left behind by torchrun, a server would wait for other ranks.
  command=(env -u RANK -u WORLD_SIZE -u LOCAL_RANK "CUDA_VISIBLE_DEVICES=$gpus" swift rollout "$config.rollout.yaml" "${model[@]}" "${model_option[@]}"
    --host "$bind" --port $((port + $1)) --vllm_data_parallel_size "$replicas")
}

training_command() {
  local host gpus='' hosts_of=() ports=() group_ports=() settings=()
  [ "$cpu" ] || gpus=$(join "${train_gpus[@]}")
  for host in "${server_hosts[@]}"; do
    for ((i = 0; i < num_servers; i++)); do
      hosts_of+=("$host")
      ports+=($((port + i)))
      group_ports+=($((group_port + ${#group_ports[@]})))
    done
  done
  settings=(${netrc:+"NETRC=$netrc"} "CUDA_VISIBLE_DEVICES=$gpus" "NPROC_PER_NODE=${#train_gpus[@]}")
  if ((rollout_nodes)); then
    settings+=("NNODES=$num_training_nodes" "NODE_RANK=$training_node" "MASTER_ADDR=$master"
      "MASTER_PORT=${MASTER_PORT:-29500}")
  else
    settings+=("MASTER_PORT=${MASTER_PORT:-$(free_port)}")
  fi
  command=(env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u VLLM_API_KEY "${settings[@]}" swift rlhf "$config.train.yaml" "${model_option[@]}" "${dataset_option[@]}"
    --vllm_mode server --vllm_server_host "${hosts_of[@]}" --vllm_server_port "${ports[@]}"
    --vllm_server_group_port "${group_ports[@]}" "${training_options[@]}")
}

# Refuse what cannot run before anything starts. GPUs and data are not checked in a dry run, which may
# be meant for another machine, nor on a serving node, which may lack the training's data.
gpus=("${train_gpus[@]}")
((!serves)) || gpus=("${rollout_gpus[@]}" "${train_gpus[@]}")
[ -z "$cpu" ] || gpus=()
check_options=(--gpus "$(join "${gpus[@]}")")
if [ "$dry_run" ] || ((!trains)); then check_options=(--settings-only); fi
ranks=$((${#train_gpus[@]} * num_training_nodes))
if [ -z "$dry_run" ]; then
  for ((n = 0; n < num_servers * serves; n++)); do
    # A process that already listens there would be mistaken for our server.
    ! listens $((port + n)) || fail "port $((port + n)) is in use on this machine. Give another --port"
  done
  say "checking the settings of $config"
fi
env -u CUDA_VISIBLE_DEVICES swift-grpo-ext check --quiet "${check_options[@]}" --ranks "$ranks" "${model_option[@]}" \
  "$config" -- "${dataset_option[@]}" "${training_options[@]}" >&2 || fail "$config cannot run with these settings (see above)"
if [ "$dry_run" ]; then
  for ((n = 0; n < num_servers * serves; n++)); do server_command "$n"; printf '%q ' "${command[@]}"; echo; done
  if ((trains)); then training_command; printf '%q ' "${command[@]}"; echo; fi
  exit 0
fi

# --- start, follow, stop ---

mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
ended=$logs/ended # the exit status, which the other nodes read
[ ! -e "$ended" ] || fail "$logs holds the logs of a launch that has ended. Give another --logs"

# Every process that we start passes this mark on to its own children.
mark=$(date +%s%N)-$$-$RANDOM
family() { grep -lsaz "^SWIFT_GRPO_EXT_LAUNCH=$mark\$" /proc/[0-9]*/environ | grep -o '[0-9]*' || true; }

take_down() { # STATUS
  local pids signal=TERM deadline=$((SECONDS + 15))
  trap '' INT TERM HUP
  trap - EXIT
  # Training nodes may finish one after another: only the first training node reports success.
  if [ ! -e "$ended" ] && ((!trains || $1 != 0 || training_node == 0)); then
    printf '%s\n' "$1 (node $node)" >"$ended" || true
  fi
  pids=$(family)
  [ -z "$pids" ] || say "stopping the remaining processes"
  while [ "$pids" ]; do
    # shellcheck disable=SC2086 # a list of numbers
    [ -z "$signal" ] || kill -"$signal" $pids 2>/dev/null || true
    signal=''
    ((SECONDS < deadline)) || signal=KILL
    sleep 0.3
    pids=$(family)
  done
  wait || true # until the followers have printed the rest of the logs
  say "logs are in $logs"
  exit "$1"
}
trap 'take_down $?' EXIT
trap 'say "interrupted"; take_down 130' INT
trap 'say "stopped by a signal"; take_down 143' TERM HUP

pid='' servers=() num_alive=0 training=''
start() { # NAME: runs `command` in its own session, where the terminal's Ctrl-C does not reach it
  local log=$logs/$1.log
  say "$1: ${command[*]}"
  : >"$log"
  env "SWIFT_GRPO_EXT_LAUNCH=$mark" PYTHONUNBUFFERED=1 setsid "${command[@]}" >>"$log" 2>&1 </dev/null &
  pid=$!
  # The follower has its own session too, or Ctrl-C would end it before the last lines.
  setsid tail -n +1 -f -s 0.5 --pid "$pid" "$log" 2>/dev/null |
    setsid sed -u -e 's/.*\r\(.\)/\1/' -e "s/^/[$1] /" &
}

check_alive() { # ends the launch if a server has ended; during training, only if none is left
  local i alive=0
  for i in "${!servers[@]}"; do
    if kill -0 "${servers[i]}" 2>/dev/null; then alive=$((alive + 1)); fi
  done
  if ((alive < num_alive)); then
    if [ -z "$training" ] || ((!alive)); then fail "a server has ended (see above and $logs)"; fi
    say "a server has ended; $alive server(s) of this node continue"
    num_alive=$alive
  fi
  if [ -e "$ended" ]; then
    read -r status by <"$ended"
    ((!trains || status)) || return 0
    say "ended by another node: status $status $by"
    exit "$status"
  fi
}

healthy() { # HOST PORT
  # shellcheck disable=SC2016 # the inner shell expands them
  timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1" && printf "GET /health HTTP/1.0\r\nHost: $0\r\n\r\n" >&3 &&
    head -n 1 <&3 | grep -q " 200 "' "$1" "$2" 2>/dev/null
}

wait_for_servers() {
  local host i looks=0 start=$SECONDS
  for host in "${server_hosts[@]}"; do
    for ((i = port; i < port + num_servers; i++)); do
      until healthy "$host" "$i"; do
        check_alive
        ((SECONDS - start < wait_seconds)) || fail "the server at $host:$i is not healthy after $wait_seconds s. Look at its log, or raise --wait"
        ((++looks % 10)) || say "waiting for $host:$i for $((SECONDS - start)) s"
        sleep 1
      done
      say "$host:$i is healthy after $((SECONDS - start)) s"
    done
  done
}

# ms-swift's client sends a key only to hosts that a netrc file lists. This file also has the user's own
# lines. It is unlinked at once, so that no launch leaves the key on disk.
open_netrc() {
  local file host own=${NETRC:-${HOME:-}/.netrc}
  file=$(mktemp) # mode 600
  exec {netrc_descriptor}<>"$file"
  rm "$file"
  {
    [ ! -r "$own" ] || cat "$own"
    printf '\n\n'
    for host in "${server_hosts[@]}"; do
      printf 'machine %s login swift password %s\n' "${host,,}" "$VLLM_API_KEY"
    done
  } >&"$netrc_descriptor"
  netrc=/proc/$$/fd/$netrc_descriptor
}

for ((n = 0; n < num_servers * serves; n++)); do
  server_command "$n"
  name=server$n
  ((!rollout_nodes)) || name=server$node.$n
  start "$name"
  servers+=("$pid")
  num_alive=${#servers[@]}
done
if ((trains)); then
  wait_for_servers
  [ -z "${VLLM_API_KEY:-}" ] || open_netrc
  training_command
  name=train
  ((!rollout_nodes)) || name=train$training_node
  start "$name"
  training=$pid
  while kill -0 "$training" 2>/dev/null; do
    check_alive
    sleep 1
  done
  status=0
  wait "$training" || status=$?
  say "the training has ended with status $status"
  exit "$status"
fi
say "serving until the training ends"
while true; do
  check_alive
  sleep 1
done
}
