#!/bin/bash
# BERT-large, the paper's baseline for equal time (Table 6): 336M parameters, 24 layers, H 1024.
# Command:  sbatch slurm/bert_large.sh  (Table 2's row: --steps 125000, 15.4 h)
# Hardware: 8 nodes x 8 GPUs with 80 GB
# Time:     PREDICTED for H100, not measured: 49.2 h, 3,146 GPU-hours with 100 Gb/s a node
#           (147.1 h with 25, 24.7 h with 400), without evaluation, checkpoints, restarts
# Plan:     albert-ds plan --model bert-large --gpus 64 --link 100 --steps 400000
# Expected: SQuAD 1.1 F1 93.5, MNLI 87.8, average 87.2 (Table 6)
#SBATCH --job-name=bert-large
#SBATCH --nodes=8
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
OUTPUT=${OUTPUT:-$RUNS/bert-large}

# ZeRO-1 reduces once a step, in one bucket, after the last micro-batch: 1343 MB of fp32 gradients
# and 671 MB of bf16 weights gathered, 19 times ALBERT-large's for the same compute.
# The alternatives to stage, bucket, type and accumulation: docs/notebook/benchmarks.md.
pretrain --model bert-large --data "$DATA" --steps 400000 --warmup-steps 3125 --dropout 0.1 \
    --sequence-length 512 --batch-size 4096 --micro-batch-size 32 --learning-rate 0.00176 \
    --deepspeed_config ds_configs/zero1_bf16.json --save-every 1000 "$@"
