#!/bin/bash
# Build shards from text with many MPI processes: sequences of at most 512 tokens, each stored once.
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
. "${SLURM_SUBMIT_DIR:-.}/slurm/common.sh"

need TEXT "a glob of text files, in quotes"
need VOCAB "spiece.model of albert-ds vocab"
need DATA "the folder to write shards to"
[ -z "${CONTAINER_IMAGE:-}" ] || need MPI "an entry of srun --mpi=list, which starts the containers"
# The program expands the glob TEXT itself. On one node the mpirun beside the interpreter is enough.
# With MPI=... in site.env srun starts the tasks, on any number of nodes.
build=("$PYTHON" -m albert_ds shards --input "$TEXT" --vocab "$VOCAB" --output "$DATA" "$@")
if [ -n "${MPI:-}" ]; then
    launch "${build[@]}"
    exit "$code"
fi
exec "${MPIRUN:-$(dirname "$(command -v "$PYTHON")")/mpirun}" -n "$SLURM_NTASKS" "${build[@]}"
