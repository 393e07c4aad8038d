#!/bin/bash
# Pretrain albert-tiny for a few steps on CPUs, to check that a cluster is set up correctly.
# Command:  DATA=demo/data sbatch slurm/smoke.sh         (make demo writes these shards)
# Hardware: 2 nodes x 2 CPU cores
# Time:     a few minutes, most of them for starting Python (not computed)
# Expected: "srun ended with 0, the run with 0" in albert-smoke-JOB.out, RUN/checkpoints/latest
#SBATCH --job-name=albert-smoke
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
. "${SLURM_SUBMIT_DIR:-.}/slurm/common.sh" || exit 2
need DATA "the folder of shards that albert-ds shards wrote"
OUTPUT=${OUTPUT:-$RUNS/albert-smoke}

pretrain --model albert-tiny --data "$DATA" --steps 20 --batch-size 32 --micro-batch-size 4 \
    --deepspeed_config ds_configs/zero1_fp32.json --log-every 1 --eval-every 10 \
    --eval-samples 64 --save-every 5 "$@"
