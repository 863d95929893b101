#!/usr/bin/env bash
# A Slurm cluster of this one machine, for `pytest -m slurm`: Debian's slurm-wlm and munge, as root, in the folder that
# is named (default: a new one). Prints what to put into the environment. `setup.sh stop FOLDER` ends it, `setup.sh
# install` only sees to it that the packages are there.
set -eu
if [ "${1-}" = stop ]; then
    for name in slurmd slurmctld munged; do
        [ ! -f "$2/$name.pid" ] || kill "$(cat "$2/$name.pid")" || true
    done
    exit 0
fi
if ! type slurmctld slurmd munged sbatch >/dev/null 2>&1; then
    apt-get update >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge >&2
fi
[ "${1-}" != install ] || exit 0
folder=${1:-$(mktemp -d /tmp/monarch-slurm-XXXXXX)}
mkdir -p "$folder"/{spool,state}

# munge refuses keys and sockets in folders that others could change, so they have a place of their own.
munge=$folder/munge
mkdir -p "$munge" && chmod 755 "$folder" "$munge"
head -c 128 /dev/urandom >"$munge/key" && chmod 600 "$munge/key"
chown -R root:root "$munge"
munged --key-file="$munge/key" --socket="$munge/socket" --pid-file="$folder/munged.pid" \
    --seed-file="$munge/seed" --log-file="$munge/log" --force >&2

node=$(hostname -s)
cat >"$folder/slurm.conf" <<EOF
ClusterName=tests
SlurmctldHost=$node(127.0.0.1)
SlurmUser=root
SlurmctldPort=${SLURMCTLD_PORT:-16817}
SlurmdPort=${SLURMD_PORT:-16818}
AuthType=auth/munge
AuthInfo=socket=$munge/socket
CryptoType=crypto/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=2
MinJobAge=60
NodeName=$node NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=tests Nodes=$node Default=YES MaxTime=10 State=UP
EOF
export SLURM_CONF=$folder/slurm.conf
slurmctld -f "$SLURM_CONF" >&2
slurmd -f "$SLURM_CONF" >&2
for _ in $(seq 100); do
    if [ "$(sinfo -h -o %T 2>/dev/null)" = idle ]; then
        echo "SLURM_CONF=$SLURM_CONF"
        exit 0
    fi
    sleep 0.2
done
echo "the node has not come up: $(sinfo -h 2>&1)" >&2
tail -n 20 "$folder"/slurmctld.log "$folder"/slurmd.log "$munge/log" >&2
exit 1
