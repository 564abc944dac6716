#!/usr/bin/env bash
# One machine of a Ray cluster for hjax. Run on CPUs, two nodes on one machine (two_hosts.sh).
#
#   node.sh token                                    makes the token of this user, if there is none
#   node.sh head ADDRESS [flags of ray start]        the first machine; ADDRESS is its own
#   node.sh worker ADDRESS HEAD:PORT [flags ...]     every other one
#   node.sh wait HEAD:PORT NODES                     returns when so many machines have joined
#
# Flags that come later win: --num-gpus=8, --num-cpus=..., --temp-dir=..., --block.
# HJAX_FIRST_PORT (6379) and HJAX_FIRST_WORKER_PORT (10002) move the ports.
set -euo pipefail

fail() {
  echo "node.sh: $1" >&2
  exit 2
}

# Ray needs the same token on every machine. Its own default is to run without.
export RAY_AUTH_MODE=token
export RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0
token=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}

command=${1:-}
[[ $command == @(token|head|worker|wait) ]] || fail "${command:-nothing} is no command; token, head, worker or wait"
shift

if [[ $command == token ]]; then
  # Ray would write it readable for everyone.
  umask 077
  if [[ ! -e $token ]]; then
    mkdir -p -- "$(dirname -- "$token")"
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$token"
  fi
  echo "$token"
  exit 0
fi

if [[ -z ${RAY_AUTH_TOKEN:-} ]]; then
  [[ -s $token ]] || fail "no token in $token; make it with 'node.sh token' and copy it to every machine"
  [[ $(stat -L -c %a -- "$token") == ?00 ]] || fail "$token can be read by others; chmod 600 it"
fi

if [[ $command == wait ]]; then
  exec python - "${1:?HEAD:PORT}" "${2:?NODES}" << 'PYTHON'
import sys
import time

import ray

address, wanted = sys.argv[1], int(sys.argv[2])
ray.init(address=address, log_to_driver=False, logging_level="warning")
deadline = time.monotonic() + 300
while (here := sum(node["Alive"] for node in ray.nodes())) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"node.sh: {here} of {wanted} machines joined {address} in 300 s; see /tmp/ray there")
    time.sleep(1)
print(f"{here} machines in the cluster at {address}")
PYTHON
fi

address=${1:?ADDRESS of this machine}
shift
first=${HJAX_FIRST_PORT:-6379}
workers=${HJAX_FIRST_WORKER_PORT:-10002}
if [[ $command == head ]]; then
  role=(--head --port="$first" --include-dashboard=false --no-monitor)
else
  role=(--address="${1:?HEAD:PORT}")
  shift
fi
ports=(
  --node-manager-port="$((first + 1))"
  --object-manager-port="$((first + 2))"
  --runtime-env-agent-port="$((first + 3))"
  --dashboard-agent-grpc-port="$((first + 4))"
  --dashboard-agent-listen-port="$((first + 5))"
  --metrics-export-port="$((first + 6))"
  --min-worker-port="$workers"
  --max-worker-port="$((workers + 997))"
)
# JAX would take one device per process from what a batch system says (its rank on the machine).
unset "${!SLURM_@}" "${!OMPI_@}"
exec ray start "${role[@]}" --node-ip-address="$address" "${ports[@]}" "$@"
