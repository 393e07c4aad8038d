#!/bin/bash
# ALBERT-xxlarge as in the paper (section 4.1, Tables 1 and 9): 223M parameters, 12 layers, H 4096.
# Command:  sbatch slurm/xxlarge.sh     (cluster: slurm/site.env; trainer flags may follow)
# Hardware: 8 nodes x 8 GPUs with 80 GB
# Time:     PREDICTED for H100, not measured: 33.9 h, 2,172 GPU-hours with 100 Gb/s a node
#           (54.3 h with 25, 28.8 h with 400), without evaluation, checkpoints, restarts.
#           --time is that of one job: at its end the run is saved and the job requeued
# Plan:     albert-ds plan --model albert-xxlarge --gpus 64 --link 100 --steps 125000
# Expected: SQuAD 1.1 F1 94.1, MNLI 88.0, average 88.7 (Table 2)
#SBATCH --job-name=albert-xxlarge
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
OUTPUT=${OUTPUT:-$RUNS/albert-xxlarge}

# ZeRO-1 reduces once a step, in one bucket, after the last micro-batch: 893 MB of fp32 gradients,
# and 446 MB of bf16 weights gathered. Weights and both moments are 2.7 GB, so no tensor
# parallelism. --tensor-parallel T splits over neighbours in a node, so only gradients leave it.
# The alternatives to stage, bucket, type, accumulation and placement: docs/notebook/benchmarks.md.
pretrain --model albert-xxlarge --data "$DATA" --steps 125000 --warmup-steps 3125 --dropout 0 \
    --sequence-length 512 --batch-size 4096 --micro-batch-size 32 --learning-rate 0.00176 \
    --deepspeed_config ds_configs/zero1_bf16.json --save-every 1000 "$@"
