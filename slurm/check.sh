#!/bin/bash
# Check this cluster's GPUs: does everything work there, is it exact, and how fast is it?
# Command:  sbatch slurm/check.sh       (a part: sbatch slurm/check.sh --piece NAME)
# Hardware: 1 node x 1 task, which starts a rank for each of its 8 GPUs (fewer: --gpus-per-node=2)
# Time:     60 minutes at most (not computed); the report names what they leave out
# Expected: PASS in $REPORT/report.md; submitted again it continues there
#SBATCH --job-name=albert-check
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=01:10:00
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}  # of each rank
. "${SLURM_SUBMIT_DIR:-.}/slurm/common.sh" || exit 2

launch "$PYTHON" -u -m albert_ds gpu-check --minutes 60 --output "${REPORT:-$RUNS/gpu-check}" "$@"
exit "$code"
