#!/bin/bash
# Fine-tune one GLUE task, SQuAD or RACE from a pretrained run or a Hugging Face folder.
# Command:  TASK=glue/mrpc TASK_DATA=glue/MRPC CHECKPOINT=runs/albert-base sbatch slurm/finetune.sh
# Hardware: 1 node x 1 GPU (sbatch --array=0-4: five seeds, each a job of its own)
# Time:     minutes for MRPC, RTE, CoLA; hours for MNLI, SQuAD, RACE (not computed)
# Expected: the paper's Table 2 or 9, by task and size
#SBATCH --job-name=albert-finetune
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
. "${SLURM_SUBMIT_DIR:-.}/slurm/common.sh" || exit 2
need TASK "one of glue/mrpc, squad1, race, ... (albert-ds finetune --help lists them)"
need TASK_DATA "the folder of the task's published files"
need CHECKPOINT "a pretrained run or a Hugging Face folder"
OUTPUT=${OUTPUT:-$RUNS/${TASK//\//-}}

finetune --task "$TASK" --data "$TASK_DATA" --checkpoint "$CHECKPOINT" \
    --deepspeed_config ds_configs/zero1_bf16_adamw.json "$@"
