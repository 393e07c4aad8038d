# Sourced by every recipe: environment, rendezvous, one task a rank, signals, bounded requeue.
#
# A recipe names what it needs (`need DATA ...`), sets OUTPUT and ends with one of
#     pretrain FLAG...      albert_ds/train.py with --output "$OUTPUT"
#     finetune FLAG...      albert_ds/finetune.py with --output "$OUTPUT"
#     launch COMMAND...     any other command, once a task, followed by `exit $code`
# Facts of the cluster come from slurm/site.env, a copy of slurm/site.env.example.
# A variable that is set before the command wins over that file: DATA=... sbatch slurm/base.sh

set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2

# Wrong input: one line, code 2, never requeued.
refuse() {
    echo "slurm: $*" >&2
    exit 2
}
# need NAME MEANING
need() { [ -n "${!1:-}" ] || refuse "$1 is not set: $2 (write $1=... before the command)"; }

[ -n "${SLURM_JOB_ID:-}" ] || refuse "this is not a Slurm job: submit it with sbatch $0"
SITE_ENV=${SITE_ENV:-slurm/site.env}
typed=$(for name in DATA PYTHON RUNS INTERFACE MPI CONTAINER_IMAGE CONTAINER_MOUNTS MAX_RESTARTS; do
    [ -z "${!name+set}" ] || printf '%s=%q\n' "$name" "${!name}"
done)
typed_output=${OUTPUT:-}
[ -f "$SITE_ENV" ] && . "$SITE_ENV"
eval "$typed"
[ "${OUTPUT:-}" = "$typed_output" ] ||
    refuse "$SITE_ENV sets OUTPUT, which belongs to one run: set RUNS, the folder of all runs"
PYTHON=${PYTHON:-.venv/bin/python}
RUNS=${RUNS:-runs}
MAX_RESTARTS=${MAX_RESTARTS:-20}  # of one job, for any reason: time limit, fault, preemption
MAX_WAIT=${MAX_WAIT:-60}          # seconds that other tasks may run on after one has ended

# srun of Slurm >= 22.05 no longer takes this from sbatch.
[ -n "${SLURM_CPUS_PER_TASK:-}" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
# Tensor parallelism overlaps an all-reduce with a matrix product. With one hardware queue kernels
# run in the order in which they were issued, so the all-reduce starts first.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# A collective that times out ends its process without aborting the communicator, because the abort
# can hang too. This is torch's default; it is set here because requeueing depends on it.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
# NCCL prints one line when it cannot create a communicator, and nothing during training.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
if [ -n "${INTERFACE:-}" ]; then
    # Without this NCCL takes the first interface that is up, and gloo the one that the host name
    # resolves to, which on Debian is 127.0.1.1.
    export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE
fi

# The ranks meet on the first node. The port depends on the job and on the restart, so a socket that
# an earlier attempt left open cannot block this one.
rendezvous() {
    local head
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    getent ahostsv4 "$head" > /dev/null ||
        head=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    export MASTER_ADDR=$head
    export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0}) % 10000))
}

# Run a command with one task a rank and forward signals to it; sets `code`. The trainer reads its
# rank from SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS.
launch() {
    rendezvous
    echo "$(date +%T) restart ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST," \
        "meeting at $MASTER_ADDR:$MASTER_PORT"
    local container=()
    if [ -n "${CONTAINER_IMAGE:-}" ]; then  # enroot with pyxis
        container=(--container-image="$CONTAINER_IMAGE" --container-workdir="$PWD"
            --container-mounts="$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
    fi
    # Not --kill-on-bad-exit=1: the ranks end by themselves and print the cause. With it, srun would
    # send TERM to all of them at the first bad exit.
    srun --kill-on-bad-exit=0 --wait="$MAX_WAIT" ${MPI:+--mpi="$MPI"} "${container[@]}" "$@" &
    local pid=$!
    trap 'kill -USR1 $pid' USR1                # the time limit is near
    trap 'cancelled=1; kill -TERM $pid' TERM   # scancel, or preemption
    while wait $pid; code=$?; kill -0 $pid 2> /dev/null; do :; done  # a signal interrupts wait
    trap - USR1 TERM
}

pretrain() { train albert_ds/train.py "$@"; }
finetune() { train albert_ds/finetune.py "$@"; }

# srun does not pass exit codes on reliably, so RUN/exit.json decides. The file of an earlier attempt
# is removed first.
train() {
    local program=$1
    shift
    mkdir -p "$OUTPUT" && rm -f "$OUTPUT/exit.json" || exit 2
    launch "$PYTHON" -u "$program" --output "$OUTPUT" "$@"
    finish "$code"
}

finish() {
    local code
    code=$(sed -n 's/.*"code": \([0-9]*\).*/\1/p' "$OUTPUT/exit.json" 2> /dev/null)
    echo "$(date +%T) srun ended with $1, the run with ${code:-a crash}"
    case "${code:-crash}" in
        0 | 2 | 3 | 4) exit "$code" ;;
    esac
    # Code 2 without a file: another job owns RUN. After a restart the owner may be an earlier attempt
    # of this job on a node that lost its network; then try again.
    [ -z "$code" ] && [ "$1" = 2 ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ] && exit 2
    if [ -n "${cancelled:-}" ]; then
        echo "cancelled: not requeued"
    elif [ -e "$OUTPUT/STOP" ]; then
        echo "stopped by $OUTPUT/STOP: remove it and submit again to continue"
    elif [ "${SLURM_RESTART_COUNT:-0}" -ge "$MAX_RESTARTS" ]; then
        echo "not requeued: MAX_RESTARTS=$MAX_RESTARTS restarts are used up; submit again to continue"
    else
        scontrol requeue "$SLURM_JOB_ID" && sleep 600  # until Slurm ends this script
    fi
    exit "${code:-1}"
}
