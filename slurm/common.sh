# Sourced by every recipe: environment, rendezvous, one task a rank, signals, bounded restarts.
#
# A recipe names what it needs (`need DATA ...`), sets OUTPUT and ends with one of
#     pretrain FLAG...      albert-ds train with --output "$OUTPUT"
#     finetune FLAG...      albert-ds finetune with --output "$OUTPUT"
#     launch COMMAND...     any other command, once a task, followed by `exit $code`
# With --spares K as the recipe's first flag K nodes of the allocation wait until others fail. In a
# job array each task is a run of its own: its number is the seed, or chooses from GRID.
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
[ -n "${SLURM_NTASKS:-}" ] || refuse "this job has no tasks: sbatch $0, or salloc --ntasks-per-node=N"
# Of a job in which sbatch was typed: the cores, to which srun would bind all tasks, step and array.
unset "${!SLURM_CPU_BIND@}" SLURM_STEP_ID
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] ||
    [ "$(squeue -h -j "$SLURM_JOB_ID" -o %K 2> /dev/null)" != N/A ] ||
    unset SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID
SITE_ENV=${SITE_ENV:-slurm/site.env}
typed=$(for name in DATA PYTHON RUNS INTERFACE MPI CONTAINER_IMAGE CONTAINER_MOUNTS MAX_RESTARTS \
    MAX_WAIT STAGE; do
    [ -z "${!name+set}" ] || printf '%s=%q\n' "$name" "${!name}"
done)
typed_output=${OUTPUT:-}
if [ -e "$SITE_ENV" ]; then
    bash -n "$SITE_ENV" || exit 2  # bash would go on without what follows the mistake
    . "$SITE_ENV" || true          # of its last command, which may be a test
elif [ "$SITE_ENV" != slurm/site.env ]; then
    refuse "SITE_ENV=$SITE_ENV: no such file (/dev/null: none)"
fi
eval "$typed"
[ "${OUTPUT:-}" = "$typed_output" ] ||
    refuse "$SITE_ENV sets OUTPUT, which belongs to one run: set RUNS, the folder of all runs"
if [ -z "${PYTHON:-}" ]; then
    PYTHON=.venv/bin/python  # of a clone
    [ -x "$PYTHON" ] || PYTHON=python  # of the shell that called sbatch, or of the container
fi
installed='import importlib.util as u; exit(not all(map(u.find_spec, ("albert_ds", "torch"))))'
[ -n "${CONTAINER_IMAGE:-}${SLURM_RESTART_COUNT:-}" ] || "$PYTHON" -c "$installed" 2> /dev/null ||
    refuse "PYTHON=$PYTHON: must be an interpreter for which albert-ds is installed"
RUNS=${RUNS:-runs}
MAX_RESTARTS=${MAX_RESTARTS:-20}  # of one job, for any reason: time limit, fault, preemption
MAX_WAIT=${MAX_WAIT:-30}          # seconds that other tasks may run on after one has ended
for name in MAX_RESTARTS MAX_WAIT; do
    [[ ${!name} =~ ^[0-9]{1,9}$ ]] || refuse "$name=${!name}: must be a whole number"
done

restarts=${SLURM_RESTART_COUNT:-0}
# A requeue by the plain number of an array's last task would requeue the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")  # those to use first come first
spares=0
if [ "${1:-}" = --spares ]; then  # a sourced file shares the arguments of the recipe
    spares=${2:-}
    [[ $spares =~ ^[0-9]{1,5}$ ]] && [ "$spares" -lt "$SLURM_JOB_NUM_NODES" ] ||
        refuse "--spares $spares: must be 0 to $((SLURM_JOB_NUM_NODES - 1)), with one node more" \
            "in sbatch --nodes for each"
    shift 2
fi
num_nodes=$((SLURM_JOB_NUM_NODES - spares))  # that the run uses

# In a job array: the flags of this task in `own`, and a folder that they name, in `element`. GRID is
# "--FLAG VALUE ... --FLAG VALUE ...", and task n takes the n-th combination, counted from 0.
own=() element=""
if [ -z "${SLURM_ARRAY_TASK_ID:-}" ]; then
    [ -z "${GRID:-}" ] || refuse "GRID is for a job array: sbatch --array=0-N"
else
    left=$SLURM_ARRAY_TASK_ID
    [ -n "${GRID:-}" ] || { GRID="--seed $left"; left=0; }
    while read -r flag values; do
        read -ra values <<< "$values"
        [[ $flag = --?* && ${#values[@]} -gt 0 ]] ||
            refuse "GRID=$GRID: must be '--FLAG VALUE ...', once or more"
        [[ " $* " != *" $flag"[\ =]* ]] || refuse "$flag: a job array sets it"
        value=${values[left % ${#values[@]}]}
        own+=("$flag" "$value")
        element+=_${flag#--}-${value//\//-}
        left=$((left / ${#values[@]}))
    done <<< "${GRID// --/$'\n'--}"
    [ "$left" = 0 ] || refuse "task $SLURM_ARRAY_TASK_ID of the job array: GRID=$GRID has fewer" \
        "combinations, numbered from 0"
    element=/${element#_}
fi

# Flags of `albert-ds shards` in `part`: in a job array those of the task's part of the text or, where
# --join comes first, of the shards.
take_part() {
    part=("$@")
    [ -n "${SLURM_ARRAY_TASK_ID:-}" ] || return 0
    [ "$SLURM_ARRAY_TASK_MIN/$SLURM_ARRAY_TASK_MAX" = "1/$SLURM_ARRAY_TASK_COUNT" ] ||
        refuse "sbatch --array: must be 1-N here; one task alone is --piece I/N without an array"
    local step=--piece
    [ "${1:-}" != --join ] || { step=--join && shift; }
    part=("$step" "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" "$@")
}

# After sbatch --export=NONE, which some sites have as their default, srun would pass nothing on.
export SLURM_EXPORT_ENV=ALL
# srun of Slurm >= 22.05 no longer takes this from sbatch.
[ -n "${SLURM_CPUS_PER_TASK:-}" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
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

# Choose the first $num_nodes of $nodes. Slurm numbers the ranks in its own order of nodes, and they
# meet on the first of these. A new port each time, so that a socket that an earlier attempt left
# open cannot block this one.
rendezvous() {
    local head
    chosen=$(grep -xF "$(head -n "$num_nodes" <<< "$nodes")" \
        <(scontrol show hostnames "$SLURM_JOB_NODELIST") | paste -sd ,)
    head=${chosen%%,*}
    getent ahostsv4 "$head" > /dev/null ||
        head=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    export MASTER_ADDR=$head
    export MASTER_PORT=$((20000 + (7 * $(date +%s) + SLURM_JOB_ID) % 10000))
    # Part of the names of all keys: other users of the nodes can reach the port.
    ALBERT_DS_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    export ALBERT_DS_SECRET
}

# Run a command with one task a rank and forward signals to it; sets `code`. The trainer reads its
# rank from SLURM_PROCID, SLURM_LOCALID and the step's number of tasks.
launch() {
    [ -z "${time_is_short:-}${cancelled:-}" ] || leave 75  # since the last one was started
    rendezvous
    echo "$(date +%T) restart $restarts on $chosen, meeting at $MASTER_ADDR:$MASTER_PORT"
    local container=() mounts="$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}${STAGE:+,$STAGE}"
    [[ ${OUTPUT:-} != /* ]] || mounts+=,$OUTPUT  # else a writable image loses what is written
    case ${CONTAINER_IMAGE:-} in
        '') ;;
        *.sif) set -- apptainer exec --nv --pwd "$PWD" --bind "$mounts" "$CONTAINER_IMAGE" "$@" ;;
        *)  # enroot with pyxis
            container=(--container-image="$CONTAINER_IMAGE" --container-workdir="$PWD"
                --container-mounts="$mounts") ;;
    esac
    watch_first_node
    # Not --kill-on-bad-exit=1: the ranks end by themselves and print the cause. With it, srun would
    # send TERM to all of them at the first bad exit. --overlap, because the step before may hold
    # the nodes until Slurm has noticed that one of them is gone.
    srun --overlap --kill-on-bad-exit=0 --wait="$MAX_WAIT" ${MPI:+--mpi="$MPI"} \
        --nodes="$num_nodes" --ntasks=$((SLURM_NTASKS * num_nodes / SLURM_JOB_NUM_NODES)) \
        --nodelist="$chosen" "${container[@]}" "$@" &
    local pid=$!
    trap 'time_is_short=1; kill -USR1 $pid' USR1  # the time limit is near
    trap 'cancelled=1; kill -TERM $pid' TERM      # scancel, or preemption
    while wait $pid; code=$?; kill -0 $pid 2> /dev/null; do :; done  # a signal interrupts wait
    trap 'time_is_short=1' USR1
    trap - TERM
    [ -z "${watcher:-}" ] || kill "$watcher" 2> /dev/null || true
}

# Python in one task, for what takes minutes. It does not know USR1: then it is for the next job.
run_once() {
    SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 num_nodes=1 launch "$PYTHON" -u "$@"
    [ "$code" = 0 ] || [ -z "${time_is_short:-}" ] || leave 75
    [ "$code" = 0 ] || exit "$code"
}

# Spares need sbatch --no-kill, and with it Slurm keeps a job whose first node is gone, where this
# script was: nobody would ever start another step. So another node watches, and requeues the job.
watch_first_node() {
    [ "$spares" -gt 0 ] || return 0
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$(tail -n 1 <<< "$nodes")" bash -c '
        echo "$SLURMD_NODENAME watches $1"
        while sleep 20; do
            nodes=$(squeue -h -j "$0" -o %N) && [ -n "$nodes" ] || continue
            scontrol show hostnames "$nodes" | grep -qx "$1" || scontrol requeue "$0"
        done' "$job" "$SLURMD_NODENAME" 2> /dev/null &
    watcher=$!
}

pretrain() {
    local word words=()
    [ -z "${STAGE:-}" ] || copy_data
    for word in "$@"; do
        [ -z "${copy:-}" ] || [ "$word" != "$DATA" ] || word=$copy
        words+=("$word")
    done
    run train "${words[@]}"
}

# Once a job: DATA to STAGE on each node, in a folder that no other job uses.
copy_data() {
    [ -z "${copy:-}" ] || return 0
    srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
        --ntasks-per-node=1 sh -c 'mkdir -p "$1" && cp -r "$0/." "$1"' "$DATA" "$STAGE/$job" ||
        { [ "$restarts" = 0 ] && refuse "STAGE=$STAGE: $DATA was not copied there"; leave 75; }
    copy=$STAGE/$job
}
finetune() { run finetune "$@"; }

run() {
    local command=$1
    shift
    # To gloo, which every run uses, the other nodes would then be this one.
    [ -n "${INTERFACE:-}${GLOO_SOCKET_IFNAME:-}" ] || [ "$num_nodes" = 1 ] ||
        [[ $(getent ahostsv4 "$HOSTNAME") != 127.* ]] ||
        refuse "INTERFACE is not set, and $HOSTNAME is a loopback address to itself: name the" \
            "network between the nodes (ip -br addr)"
    OUTPUT=$OUTPUT$element
    set -- "$@" "${own[@]}"  # after those of the recipe, which may have the same
    until
        # exit.json is an earlier attempt's; that one had a folder, so its storage may come back.
        mkdir -p "$OUTPUT" && rm -f "$OUTPUT/exit.json" || { [ "$restarts" = 0 ] && exit 2; leave 75; }
        launch "$PYTHON" -u -m albert_ds "$command" --output "$OUTPUT" "$@"
        finish "$code"
    do :; done
}

# After an attempt: return 0 where all steps are done and 1 to try again in this allocation; requeue
# the job, or exit. srun does not pass exit codes on reliably, so RUN/exit.json decides.
finish() {
    local code
    code=$(sed -n 's/.*"code": \([0-9]*\).*/\1/p' "$OUTPUT/exit.json" 2> /dev/null)
    echo "$(date +%T) srun ended with $1, the run with ${code:-a crash}"
    case "${code:-crash}" in
        0) return 0 ;;
        2 | 3 | 4) exit "$code" ;;
    esac
    # Code 2 without a file: another job owns RUN. After a restart the owner may be an earlier
    # attempt of this job on a node that lost its network; then try again.
    [ -z "$code" ] && [ "$1" = 2 ] && [ "$restarts" = 0 ] && exit 2
    leave "${code:-1}"
}

# leave CODE, after a failure: return 1 to try again in this allocation; requeue the job, or exit.
leave() {
    if [ -n "${cancelled:-}" ]; then
        echo "cancelled: not restarted"
    elif [ -e "${OUTPUT:-}/STOP" ]; then
        echo "stopped by $OUTPUT/STOP: remove it and submit again to continue"
    elif [ "$restarts" -ge "$MAX_RESTARTS" ]; then
        echo "not restarted: MAX_RESTARTS=$MAX_RESTARTS are used up; submit again to continue"
    elif [ "$1" != 75 ] && can_stay; then
        restarts=$((restarts + 1))
        return 1
    else
        for _ in {1..6}; do  # Slurm's controller may be busy or start anew
            scontrol requeue "$job" && sleep 600  # until Slurm ends this script
            sleep 10
        done
    fi
    exit "$1"
}

# After a fault the next attempt starts at once on the nodes that are left. Not for a second time
# from the same checkpoint: then other nodes may be needed, or time for the storage to come back.
can_stay() {
    local saved
    saved=$OUTPUT/$(cat "$OUTPUT/checkpoints/latest" 2> /dev/null)
    [ "$saved" != "${tried:-}" ] || return 1
    tried=$saved
    find_healthy
    [ "$(wc -w <<< "$nodes")" -ge "$num_nodes" ] && [ -z "${time_is_short:-}" ]
}

# Keep those nodes that can start a task. Those that the failure names come last.
find_healthy() {
    local node answers good="" named=""
    # srun returns 0 even where it could not start its task, so each node prints its name.
    answers=$(
        for node in $nodes; do
            timeout 30 srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" \
                printenv SLURMD_NODENAME 2> /dev/null &
        done
        wait
    )
    for node in $nodes; do
        if ! grep -qx "$node" <<< "$answers"; then
            echo "$node does not answer"
        elif grep -qw "$node" "$OUTPUT/exit.json" 2> /dev/null; then
            named+=$node$'\n'
        else
            good+=$node$'\n'
        fi
    done
    nodes=$(printf %s "$good$named")
}
