#!/bin/bash
# ALBERT-base as in the paper (section 4.1, Tables 1 and 2): 12M parameters, 12 layers, H 768.
# Command:  sbatch slurm/base.sh        (cluster: slurm/site.env; trainer flags may follow)
# Hardware: 1 node x 8 GPUs with 80 GB
# Time:     PREDICTED for H100, not measured: 13.1 h, 105 GPU-hours on one node,
#           without evaluation, checkpoints, restarts
# Plan:     albert-ds plan --model albert-base --gpus 8 --link 100 --steps 125000 --micro-batch-size 64
# Expected: held-out SOP accuracy 86.5 % (Table 5); SQuAD 1.1 F1 89.3, MNLI 81.6 (Table 2)
#SBATCH --job-name=albert-base
#SBATCH --nodes=1
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
OUTPUT=${OUTPUT:-$RUNS/albert-base}

# ZeRO-1 reduces once a step, in one bucket, after the last micro-batch: 47 MB of fp32 gradients,
# and 24 MB of bf16 weights gathered. All traffic stays inside the node.
# The alternatives to stage, bucket, type and accumulation: docs/notebook/benchmarks.md.
pretrain --model albert-base --data "$DATA" --steps 125000 --warmup-steps 3125 --dropout 0.1 \
    --sequence-length 512 --batch-size 4096 --micro-batch-size 64 --learning-rate 0.00176 \
    --deepspeed_config ds_configs/zero1_bf16.json --save-every 1000 "$@"
