#!/bin/bash
# Build shards from text with many processes: sequences of at most 512 tokens, each stored once.
# Command:  TEXT='text/*.zst' VOCAB=vocab/spiece.model sbatch slurm/shards.sh --language en
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
