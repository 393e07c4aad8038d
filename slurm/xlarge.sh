#!/bin/bash
# ALBERT-xlarge as in the paper (section 4.1, Tables 1 and 2): 60M parameters, 24 layers, H 2048.
# Command:  sbatch slurm/xlarge.sh      (cluster: slurm/site.env; trainer flags may follow)
# Hardware: 8 nodes x 8 GPUs with 80 GB
# Time:     PREDICTED for H100, not measured: 17.6 h, 1,128 GPU-hours with 100 Gb/s a node
#           (23.0 h with 25, 16.3 h with 400), without evaluation, checkpoints, restarts
# Plan:     albert-ds plan --model albert-xlarge --gpus 64 --link 100 --steps 125000
# Expected: SQuAD 1.1 F1 92.5, MNLI 86.4, average 85.5 (Table 2)
#SBATCH --job-name=albert-xlarge
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
OUTPUT=${OUTPUT:-$RUNS/albert-xlarge}

# ZeRO-1 reduces once a step, in one bucket, after the last micro-batch: 236 MB of fp32 gradients,
# and 118 MB of bf16 weights gathered, for 64 sequences a GPU. BERT-large moves 5.7 times that.
# The alternatives to stage, bucket, type and accumulation: docs/notebook/benchmarks.md.
pretrain --model albert-xlarge --data "$DATA" --steps 125000 --warmup-steps 3125 --dropout 0.1 \
    --sequence-length 512 --batch-size 4096 --micro-batch-size 32 --learning-rate 0.00176 \
    --deepspeed_config ds_configs/zero1_bf16.json --save-every 1000 "$@"
