# Sourced by every recipe: environment, rendezvous, one task a rank, signals, bounded requeue.
#
# A recipe sets OUTPUT and ends with one of
#     pretrain FLAG...      albert_ds/train.py with --output "$OUTPUT"
#     finetune FLAG...      albert_ds/finetune.py, likewise
#     launch COMMAND...     any other command, once a task, followed by `exit $code`
# Facts of the cluster come from slurm/site.env, made once from slurm/site.env.example.

set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
SITE_ENV=${SITE_ENV:-slurm/site.env}
[ -f "$SITE_ENV" ] && . "$SITE_ENV"
PYTHON=${PYTHON:-.venv/bin/python}
MAX_RESTARTS=${MAX_RESTARTS:-20}  # of one job, whatever the reason: time limit, fault, preemption
MAX_WAIT=${MAX_WAIT:-60}          # seconds the other tasks may live on after one has ended

# srun of Slurm >= 22.05 no longer takes this from sbatch.
[ -n "${SLURM_CPUS_PER_TASK:-}" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
# Tensor parallelism hides an all-reduce behind a product; with one hardware queue the kernels run
# in the order they were issued, so the all-reduce starts first.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# A collective that times out ends its process, without first trying to abort the communicator,
# which can hang as well. torch's default, said here because the requeue rests on it.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
# One line on why a communicator could not be made; nothing a step.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
if [ -n "${INTERFACE:-}" ]; then
    # Both libraries otherwise choose by themselves: NCCL the first interface that is up, gloo the
    # one the host name resolves to, which on Debian is 127.0.1.1.
    export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE
fi

# Where the ranks meet: the first node, at a port that changes with the job and with each restart,
# so that a socket left over from the last try cannot block this one.
rendezvous() {
    local head
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    getent ahostsv4 "$head" > /dev/null ||
        head=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    export MASTER_ADDR=$head
    export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0}) % 10000))
}

# Run a command as one task a rank and pass signals on; sets `code`. The trainer takes its rank from
# SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS.
launch() {
    rendezvous
    echo "$(date +%T) restart ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST," \
        "meeting at $MASTER_ADDR:$MASTER_PORT"
    local container=()
    if [ -n "${CONTAINER_IMAGE:-}" ]; then  # enroot with pyxis
        container=(--container-image="$CONTAINER_IMAGE" --container-workdir="$PWD"
            --container-mounts="$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
    fi
    # Not --kill-on-bad-exit=1: ranks end by themselves and say how; srun's TERM would talk over it.
    srun --kill-on-bad-exit=0 --wait="$MAX_WAIT" ${MPI:+--mpi="$MPI"} "${container[@]}" "$@" &
    local pid=$!
    trap 'kill -USR1 $pid' USR1                # the time limit is near
    trap 'cancelled=1; kill -TERM $pid' TERM   # scancel, or Slurm requeues the job by itself
    while wait $pid; code=$?; kill -0 $pid 2> /dev/null; do :; done  # a signal ends wait early
    trap - USR1 TERM
}

pretrain() { train albert_ds/train.py "$@"; }
finetune() { train albert_ds/finetune.py "$@"; }

# Launchers garble exit codes, so RUN/exit.json decides, and one from an earlier try must not.
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
    # Another job owns RUN, so there is no file. After a restart that may be this job's former self
    # on a node that is cut off: then try again.
    [ -z "$code" ] && [ "$1" = 2 ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ] && exit 2
    if [ -n "${cancelled:-}" ]; then
        echo "cancelled: not requeued"
    elif [ -e "$OUTPUT/STOP" ]; then
        echo "stopped by $OUTPUT/STOP: remove it and submit again to go on"
    elif [ "${SLURM_RESTART_COUNT:-0}" -ge "$MAX_RESTARTS" ]; then
        echo "not requeued: MAX_RESTARTS=$MAX_RESTARTS restarts are used up; submit again to go on"
    else
        scontrol requeue "$SLURM_JOB_ID" && sleep 600  # until Slurm ends this script
    fi
    exit "${code:-1}"
}
