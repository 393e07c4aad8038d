#!/bin/bash
# Measure a training step on this cluster: samples/s, MFU and bytes sent, models side by side.
# Command:  sbatch slurm/bench.sh       (cluster: slurm/site.env; more flags may follow)
# Hardware: 2 nodes x 8 GPUs with 80 GB
# Time:     under an hour: 5 rounds of one step of each model with 8 and 32 sequences a pass (not computed)
# Expected: $REPORT/throughput.json, $REPORT/comm_volume.json; tables in albert-bench-JOB.out
#SBATCH --job-name=albert-bench
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
. "${SLURM_SUBMIT_DIR:-.}/slurm/common.sh" || exit 2
REPORT=${REPORT:-$RUNS/bench-$SLURM_JOB_ID}
OUTPUT=$REPORT
mkdir -p "$OUTPUT" || exit 2
MODELS="bert-large albert-large albert-xlarge albert-xxlarge"

launch "$PYTHON" -u -m albert_ds bench --models $MODELS --micro-batch 8,32 \
    --deepspeed_config ds_configs/zero1_bf16.json --output "$REPORT/throughput.json" "$@"
first=$code
launch "$PYTHON" -u -m albert_ds traffic --measure --models $MODELS --output "$REPORT/comm_volume.json"
exit $((first > code ? first : code))
