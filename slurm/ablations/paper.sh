#!/bin/bash
# A row of a table of the paper, at its size: pretrain, fine-tune on its five tasks, print the table.
# Command:  ROWS=all-768 TASKS=tasks sbatch slurm/ablations/paper.sh table4
# Hardware: 1 node x 8 GPUs with 80 GB; xlarge, xxlarge and BERT-large: sbatch --nodes=8
# Time:     of pretraining, the header of that size's recipe; of fine-tuning, not computed
# Expected: the row as in the paper, in albert-ablation-JOB.out; submitted again it continues
#SBATCH --job-name=albert-ablation
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
stop() {
    echo "slurm: $*" >&2
    exit 2
}
[ -f "slurm/ablations/${1:-}.sh" ] ||
    stop "${1:-no table}: must be the name of a script in slurm/ablations, such as table4"
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || stop "a job array is for seeds of one run; use ROWS"
table=$1
shift
# exec, because Slurm's signals go to this process.
SCALE=paper exec bash "slurm/ablations/$table.sh" "$@"
