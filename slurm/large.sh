#!/bin/bash
# ALBERT-large as in the paper (section 4.1, Tables 1 and 2): 18M parameters, 24 layers, H 1024.
# Command:  sbatch slurm/large.sh       (cluster: slurm/site.env; trainer flags may follow)
# Hardware: 2 nodes x 8 GPUs with 80 GB
# Time:     PREDICTED for H100, not measured: 20.3 h, 325 GPU-hours with 100 Gb/s a node
#           (21.9 h with 25, 19.9 h with 400), without evaluation, checkpoints, restarts
# Plan:     albert-ds plan --model albert-large --gpus 16 --link 100 --steps 125000 --micro-batch-size 64
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
. "${SLURM_SUBMIT_DIR:-.}/slurm/common.sh" || exit 2
need DATA "the folder of shards that albert-ds shards wrote"
OUTPUT=${OUTPUT:-$RUNS/albert-large}

# ZeRO-1 reduces once a step, in one bucket, after the last micro-batch: 71 MB of fp32 gradients,
# and 36 MB of bf16 weights gathered. A ring over 16 ranks sends 167 MB a rank for them; a 10 Gbit/s
# network carries that 7.5 times a second.
# The alternatives to stage, bucket, type and accumulation: docs/notebook/benchmarks.md.
pretrain --model albert-large --data "$DATA" --steps 125000 --warmup-steps 3125 --dropout 0.1 \
    --sequence-length 512 --batch-size 4096 --micro-batch-size 64 --learning-rate 0.00176 \
    --deepspeed_config ds_configs/zero1_bf16.json --save-every 1000 "$@"
