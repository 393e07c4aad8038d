#!/bin/bash
# Text -> shards, by many processes over MPI: sequences of at most 512 tokens, each stored once.
# Command:  TEXT='text/*.zst' VOCAB=vocab/spiece.model sbatch slurm/shards.sh
# Hardware: 1 node x 32 CPU cores
# Time:     not computed: the rate of one process stands in docs/data.md
# Expected: $DATA/index.json, the same bytes for any number of tasks
#SBATCH --job-name=albert-shards
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=32
#SBATCH --cpus-per-task=1
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.out
. "${SLURM_SUBMIT_DIR:-.}/slurm/common.sh"

# TEXT is a glob that the program expands by itself. One node needs no more than the mpirun that
# came with the interpreter; with MPI=... of site.env srun starts the tasks, on any number of nodes.
build=("$PYTHON" tools/build_shards.py --input "$TEXT" --vocab "$VOCAB" --output "$DATA" "$@")
if [ -n "${MPI:-}" ]; then
    launch "${build[@]}"
    exit "$code"
fi
exec "${MPIRUN:-$(dirname "$PYTHON")/mpirun}" -n "$SLURM_NTASKS" "${build[@]}"
