#!/bin/bash
# Build shards from text with many processes: sequences of at most 512 tokens, each stored once.
# Command:  TEXT='text/*.zst' VOCAB=vocab/spiece.model sbatch slurm/shards.sh --language en
#           In a job array, --array=1-N, each task takes a part, without MPI: of the text, and with
#           --join, once all of it is encoded, of the shards. A job with --join and no array ends it.
# Hardware: 1 node x 32 CPU cores
# Time:     not computed; docs/data.md has the rate of one process
# Expected: $DATA/index.json, the same bytes for any number of tasks
#SBATCH --job-name=albert-shards
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=32
#SBATCH --cpus-per-task=1
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.out
. "${SLURM_SUBMIT_DIR:-.}/slurm/common.sh" || exit 2

need TEXT "a glob of text files, in quotes"
need VOCAB "spiece.model of albert-ds vocab"
need DATA "the folder to write shards to"
[ -z "${CONTAINER_IMAGE:-}" ] || need MPI "an entry of srun --mpi=list, which starts the containers"
[ -z "${CONTAINER_IMAGE:-}" ] || { OUTPUT=$DATA && mkdir -p "$DATA"; } || exit 2  # to be mounted
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    [ "$SLURM_ARRAY_TASK_MIN/$SLURM_ARRAY_TASK_MAX" = "1/$SLURM_ARRAY_TASK_COUNT" ] ||
        refuse "sbatch --array: must be 1-N here; one task alone is --piece I/N without an array"
    step=--piece
    [ "${1:-}" != --join ] || { step=--join && shift; }
    set -- "$step" "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" "$@"
fi
# The program expands the glob TEXT itself. One node needs no MPI. With MPI=... in site.env srun
# starts the tasks, and without it the mpirun beside the interpreter.
build=("$PYTHON" -m albert_ds shards --input "$TEXT" --vocab "$VOCAB" --output "$DATA")
if [ -n "${MPI:-}" ]; then
    launch "${build[@]}" "$@"
    exit "$code"
fi
[ "$SLURM_JOB_NUM_NODES" -gt 1 ] || exec "${build[@]}" --processes "$SLURM_NTASKS" "$@"
mpirun=$(dirname "$(command -v "$PYTHON")")/mpirun
[ -x "$mpirun" ] || need MPI "an entry of srun --mpi=list, for several nodes without $mpirun"
exec "$mpirun" -n "$SLURM_NTASKS" "${build[@]}" "$@"
