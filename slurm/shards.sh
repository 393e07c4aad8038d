#!/bin/bash
# Build shards from text with many processes: sequences of at most 512 tokens, each stored once.
# Command:  TEXT='text/*.zst' VOCAB=vocab/spiece.model sbatch slurm/shards.sh --language en
#           --array=1-N: a task takes a part, of the text or, with --join, of the shards (docs/data.md)
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
# The program expands the glob TEXT itself. One node needs no MPI; for several srun starts the tasks
# with MPI=... in site.env, and without it the mpirun beside the interpreter.
take_part "$@"
build=("$PYTHON" -m albert_ds shards --input "$TEXT" --vocab "$VOCAB" --output "$DATA" "${part[@]}")
[ -z "${MPI:-}" ] || { launch "${build[@]}"; exit "$code"; }
[ "$SLURM_JOB_NUM_NODES" -gt 1 ] || exec "${build[@]}" --processes "$SLURM_NTASKS"
mpirun=$(dirname "$(command -v "$PYTHON")")/mpirun
[ -x "$mpirun" ] || need MPI "an entry of srun --mpi=list, for several nodes without $mpirun"
exec "$mpirun" -n "$SLURM_NTASKS" "${build[@]}"
