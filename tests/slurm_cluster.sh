#!/usr/bin/env bash
# A real Slurm on this machine for the tests: munge, controller and one or more nodes, all in one folder and on free
# ports, beside whatever else runs here. Debian: apt-get install slurm-wlm munge
#
#   bash tests/slurm_cluster.sh up DIR [NODES]   start (1 node); then SLURM_CONF=DIR/slurm.conf for srun, sbatch, ...
#   bash tests/slurm_cluster.sh down DIR         stop; DIR stays, with the logs
#
# The nodes say that they have GPUs, so that --gres=gpu:N of the launch scripts is served; there is nothing behind them.
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin"

usage() {
    sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}
[ $# -ge 2 ] || usage
command=$1 dir=$2 nodes=${3:-1}

pids() { cat "$dir"/run/*.pid 2>/dev/null || true; }

down() {
    if [ -f "$dir/slurm.conf" ]; then
        SLURM_CONF=$dir/slurm.conf timeout 10 scancel --user="$(id -un)" --signal=KILL 2>/dev/null || true
    fi
    local pid tries
    # One at a time: the pid files are ours, but a pid may have been given to another process since.
    for pid in $(pids); do
        case $(cat "/proc/$pid/comm" 2>/dev/null) in
            slurmd | slurmctld | munged) kill "$pid" 2>/dev/null || true ;;
            *) continue ;;
        esac
        for tries in $(seq 100); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
    done
    rm -f "$dir"/run/*
}

up() {
    local program
    for program in munged slurmctld slurmd srun; do
        command -v "$program" >/dev/null || {
            echo "no $program here; on Debian: apt-get install slurm-wlm munge" >&2
            exit 1
        }
    done
    mkdir -p "$dir"
    dir=$(cd "$dir" && pwd)
    [ -z "$(pids)" ] || down
    mkdir -p "$dir"/{run,log,state,gpu}
    chmod 755 "$dir" "$dir/run" # munge's clients have to reach the socket
    (umask 077 && head -c 128 /dev/urandom >"$dir/munge.key")

    local ports user
    read -r -a ports < <(python3 - $((nodes + 1)) <<'PY'
import socket
import sys

sockets = [socket.create_server(('127.0.0.1', 0)) for _ in range(int(sys.argv[1]))]
print(*[s.getsockname()[1] for s in sockets])
PY
    )
    user=$(id -un)
    cat >"$dir/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.socket
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=2
GresTypes=gpu
CONF
    local i
    for i in $(seq "$nodes"); do
        mkdir -p "$dir/spool-node$i"
        # More CPUs than there may be: a test must not wait for cores.
        echo "NodeName=node$i NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=${ports[$i]} CPUs=8 RealMemory=1000 Gres=gpu:8"
    done >>"$dir/slurm.conf"
    echo 'PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP' >>"$dir/slurm.conf"
    touch "$dir"/gpu/{0..7}
    echo "Name=gpu File=$dir/gpu/[0-7]" >"$dir/gres.conf"

    export SLURM_CONF=$dir/slurm.conf
    # --force: it may run as root and from a folder below /tmp
    munged --force --key-file="$dir/munge.key" --socket="$dir/run/munge.socket" --pid-file="$dir/run/munged.pid" \
        --log-file="$dir/log/munged.log" --seed-file="$dir/munge.seed" 2>>"$dir/log/munged.log"
    slurmctld -c
    for i in $(seq "$nodes"); do slurmd -N "node$i"; done
    for i in $(seq 150); do
        if [ "$(sinfo --noheader --Node --states=idle --format=%N 2>/dev/null | sort -u | wc -l)" = "$nodes" ]; then
            return
        fi
        sleep 0.2
    done
    sinfo >&2 || true
    tail -n 20 "$dir"/log/*.log >&2 || true
    down
    echo "the cluster did not come up; its logs are in $dir/log" >&2
    exit 1
}

case $command in
    up) up ;;
    down) down ;;
    *) usage ;;
esac
