#!/bin/sh
# Runs a command in a Ray cluster of two "nodes" on this machine, then ends the cluster: `ray symmetric-run` without Slurm.
#
#     scripts/examples/two_nodes.sh python scripts/examples/phenobarbital.py --engine ray --ray-address auto
#
# Each node is a raylet with one CPU. Raylets of `ray start` listen on all network interfaces. So they ask for a token, which
# only this user can read, and which ends with them.
set -eu
[ $# -gt 0 ] || { echo "usage: $0 COMMAND..." >&2; exit 2; }

RAY_ADDRESS=127.0.0.1:${PORT:-6399}
RAY_TMPDIR=$(mktemp -d)
RAY_AUTH_TOKEN_PATH=$RAY_TMPDIR/token
(umask 077 && od -An -N16 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")
export RAY_ADDRESS RAY_TMPDIR RAY_AUTH_TOKEN_PATH RAY_AUTH_MODE=token
export RAY_USAGE_STATS_ENABLED=0

nodes=
end() {
    trap - EXIT HUP INT TERM
    kill $nodes 2>/dev/null || true # these two only; `ray stop` would end every Ray cluster of this user
    wait $nodes || true
    rm -rf "$RAY_TMPDIR"
}
trap end EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

node() { # a raylet in the background, whose agent has the first port; two of them would take the same ports for workers
    agent=$1
    shift
    ray start --block --num-cpus=1 --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port="$agent" "$@" \
        >"$RAY_TMPDIR/$agent.log" 2>&1 &
    nodes="$nodes $!"
}

count='import ray; ray.init(address="auto", log_to_driver=False); print(sum(node["Alive"] for node in ray.nodes()))'

alive() { # how many nodes there are
    timeout 60 python -c "$count" 2>/dev/null | tail -n 1
}

wait_for() { # so many nodes, of which the last writes this log; ends if one of them has
    until [ "$(ray health-check --address="$RAY_ADDRESS" >/dev/null 2>&1 && alive)" = "$1" ]; do
        for node in $nodes; do
            kill -0 "$node" 2>/dev/null || { cat "$2" >&2; exit 1; }
        done
    done
}

port=${RAY_ADDRESS#*:}
node $((port + 1)) --head --include-dashboard=false --port="$port"
wait_for 1 "$RAY_TMPDIR/$((port + 1)).log"
node $((port + 2)) --address="$RAY_ADDRESS"
wait_for 2 "$RAY_TMPDIR/$((port + 2)).log"
"$@"
