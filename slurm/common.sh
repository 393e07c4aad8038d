# Sourced by every recipe: environment, rendezvous, one task a rank, signals, bounded requeue.
#
# A recipe sets OUTPUT (the RUN folder) and calls `pretrain FLAG...`. Site facts (modules, container,
# network interface, data path) come from slurm/site.env, made once from slurm/site.env.example.

set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
[ -f slurm/site.env ] && . slurm/site.env
MAX_RESTARTS=${MAX_RESTARTS:-20}

# srun of Slurm >= 22.05 no longer takes this from sbatch.
[ -n "${SLURM_CPUS_PER_TASK:-}" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
# Keeps the order of kernels in which a tensor-parallel all-reduce hides behind a product.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# A failed collective ends the process instead of hanging it, so that the job can be requeued.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1

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

# Run the trainer as one task a rank; pass signals on; end as RUN/exit.json says.
pretrain() {
    rendezvous
    echo "$(date +%T) restart ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST via $MASTER_ADDR:$MASTER_PORT"
    srun --kill-on-bad-exit=1 --wait=60 ${CONTAINER_IMAGE:+--container-image="$CONTAINER_IMAGE"} \
        ${CONTAINER_MOUNTS:+--container-mounts="$CONTAINER_MOUNTS"} \
        "${PYTHON:-.venv/bin/python}" -u albert_ds/train.py --output "$OUTPUT" "$@" &
    local pid=$! code
    trap 'kill -USR1 $pid' USR1   # the time limit is near: checkpoint, then requeue
    trap 'cancelled=1; kill -TERM $pid' TERM
    while wait $pid; code=$?; kill -0 $pid 2> /dev/null; do :; done   # a trapped signal ends wait early
    trap - USR1 TERM
    finish "$code"
}

# Launchers garble exit codes, so the file decides; where there is none, the run crashed.
finish() {
    local code
    code=$(sed -n 's/.*"code": \([0-9]*\).*/\1/p' "$OUTPUT/exit.json" 2> /dev/null)
    echo "$(date +%T) srun ended with $1, the run with ${code:-a crash}"
    case "${code:-crash}" in
        0 | 2 | 3 | 4) exit "$code" ;;
    esac
    if [ -z "${cancelled:-}" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$MAX_RESTARTS" ]; then
        scontrol requeue "$SLURM_JOB_ID" && sleep 600
    fi
    exit "${code:-1}"
}
