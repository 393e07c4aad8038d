#!/bin/bash
# ALBERT-xxlarge as in the paper (section 4.1, Tables 1 and 9): 223M parameters, 12 layers, H 4096.
# Command:  sbatch slurm/xxlarge.sh        (site facts: slurm/site.env)
# Hardware: 8 nodes x 8 GPUs with 80 GB
# Time:     7.58 TFLOP a sequence x 4096 x 125,000 steps = 3.9e9 TFLOP: 34 h if a GPU sustains
#           495 TFLOP/s (half of an H100's dense bf16 peak; arithmetic, not measured)
# Expected: held-out MLM accuracy and SOP accuracy beside the paper's 86.5 % for base (Table 5)
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
. "${SLURM_SUBMIT_DIR:-.}/slurm/common.sh"
OUTPUT=${OUTPUT:-runs/albert-xxlarge}

# ZeRO-1, gradients reduced once a step in fp32: 0.89 GB for 64 sequences a GPU. No tensor
# parallelism: weights and both moments are 3.6 GB, and a block's compute dwarfs its gradient.
pretrain --model albert-xxlarge --data "$DATA" --steps 125000 --warmup-steps 3125 \
    --batch-size 4096 --micro-batch-size 8 --learning-rate 0.00176 \
    --deepspeed_config ds_configs/zero1_bf16.json --save-every 1000 --num-workers 1 "$@"
