#!/bin/bash
# ALBERT-large as in the paper (section 4.1, Tables 1 and 2): 18M parameters, 24 layers, H 1024.
# Command:  sbatch slurm/large.sh       (site facts: slurm/site.env; more flags may follow)
# Hardware: 2 nodes x 8 GPUs with 80 GB
# Time:     1.007 TFLOP a sequence (model/arithmetic.py) x 4096 x 125,000 steps = 22.4 h at 400
#           TFLOP/s a GPU (assumed: two fifths of an H100's dense bf16 peak; not measured)
# Expected: SQuAD 1.1 F1 90.6, MNLI 83.5, average 82.4 (Table 2)
#SBATCH --job-name=albert-large
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
. "${SLURM_SUBMIT_DIR:-.}/slurm/common.sh"
OUTPUT=${OUTPUT:-runs/albert-large}

# ZeRO-1: one reduction a step, in one bucket, after the last micro-batch: 71 MB of fp32 gradients,
# and 36 MB of bf16 weights gathered; an ordinary 10 Gbit/s network carries that 10 times a second.
# Stage, bucket, type and accumulation beside what else was tried: docs/benchmarks.md.
pretrain --model albert-large --data "$DATA" --steps 125000 --warmup-steps 3125 --dropout 0.1 \
    --sequence-length 512 --batch-size 4096 --micro-batch-size 32 --learning-rate 0.00176 \
    --deepspeed_config ds_configs/zero1_bf16.json --save-every 1000 --num-workers 1 "$@"
