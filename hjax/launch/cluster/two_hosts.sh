#!/usr/bin/env bash
# Two machines of a cluster on this one: loopback addresses 127.0.0.2 and 127.0.0.3, on CPUs.
# Run as tests/extended/test_cluster_files.py does (slow). Linux only: elsewhere 127.0.0.3 needs an alias.
#
#   two_hosts.sh COMMAND ...     starts both, runs the command, stops what it started
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
folder=$(mktemp -d /tmp/hjax-XXXXXX) # short: Ray's sockets lie below it, and may have 107 letters
export RAY_AUTH_TOKEN_PATH=$folder/token
unset RAY_AUTH_TOKEN
pids=()

# shellcheck disable=SC2329 # by the traps
stop() {
  trap - EXIT
  ((${#pids[@]} == 0)) || kill "${pids[@]}" 2> /dev/null || true
  wait || true
  rm -rf -- "$folder"
}
trap stop EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

bash "$here/node.sh" token > /dev/null
bash "$here/node.sh" head 127.0.0.2 --temp-dir="$folder/head" --block > "$folder/head.log" 2>&1 &
pids+=($!)
bash "$here/node.sh" wait 127.0.0.2:6379 1 > /dev/null
HJAX_FIRST_PORT=6479 HJAX_FIRST_WORKER_PORT=11002 \
  bash "$here/node.sh" worker 127.0.0.3 127.0.0.2:6379 --temp-dir="$folder/worker" --block \
  > "$folder/worker.log" 2>&1 &
pids+=($!)
bash "$here/node.sh" wait 127.0.0.2:6379 2

RAY_AUTH_MODE=token "$@" &
pids+=($!)
status=0
wait "${pids[-1]}" || status=$?
unset "pids[-1]"
exit "$status"
