#!/bin/bash
# Which recipe learns most on this machine in a given time? Every row trains for as long, on one CPU
# core, over seeds: its speed is measured first, and the steps follow from it. Prints one table. Rows
# with other masks or lengths have a held-out loss of their own; the MLM accuracy is probe.py's, under
# the same masks for every row.
#
#   DATA=shards bash slurm/ablations/recipe.sh
#
# DATA     folder of shards (tools/build_shards.py)
# LENGTH   tokens of a sample (default: 128), at most those of the shards
# BLIMP    folder of minimal pairs for tools/probe.py (default: left out)
# OUT      folder of the results (default: ablations/recipe); the same command continues there
# MINUTES  of each run (default: 20); STEPS=N takes N steps instead
# SEEDS    number of seeds of each row (default: 2)
# ROWS     names of the rows to run (default: all); the table prints what is there
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-.venv/bin/python} OUT=${OUT:-ablations/recipe}
LENGTH=${LENGTH:-128} MINUTES=${MINUTES:-20} SEEDS=${SEEDS:-2} ROWS=${ROWS:-}
ALL=()
TRIAL=16 # steps that are timed, in four intervals; the fastest counts

stop() {
    echo "ablations: $*" >&2
    exit 2
}
[ -n "${DATA:-}" ] || stop "DATA is not set: the folder of shards"

ADAMW=ds_configs/zero1_fp32_adamw.json LAMB=ds_configs/zero1_fp32.json
BASE=(--model albert-tiny --embedding-size 128 --hidden-size 256 --num-layers 6 --num-heads 4
    --dropout 0 --sequence-length "$LENGTH" --learning-rate 0.001 --deepspeed_config "$ADAMW")

train() { # FOLDER STEPS BATCH FLAG...
    local folder=$1 steps=$2 batch=$3 every=$(($2 > 20 ? $2 / 20 : 1))
    shift 3
    "$PYTHON" albert_ds/train.py --data "$DATA" --output "$folder" --steps "$steps" \
        "${BASE[@]}" --batch-size "$batch" --micro-batch-size "$batch" \
        --warmup-steps $((steps / 10)) --log-every "$every" --eval-every "$every" \
        --eval-samples 1024 "$@"
}

# measure NAME BATCH FLAG...: the steps that fit into MINUTES, measured once.
measure() {
    local file=$OUT/$1/steps name=$1 batch=$2
    shift 2
    if [ -n "${STEPS:-}" ]; then echo "$STEPS"; return; fi
    if [ ! -s "$file" ]; then
        rm -rf "$OUT/$name/trial"
        train "$OUT/$name/trial" $TRIAL "$batch" "$@" --log-every 4 --eval-every $TRIAL >&2
        "$PYTHON" - "$OUT/$name/trial/metrics.jsonl" "$MINUTES" > "$file.tmp" <<'PY'
import json, sys
records = [json.loads(line) for line in open(sys.argv[1])]
seconds = min(r["step_seconds"] for r in records if "step_seconds" in r)
print(max(20, int(60 * float(sys.argv[2]) / seconds)))
PY
        mv "$file.tmp" "$file"
        rm -r "$OUT/$name/trial"
    fi
    cat "$file"
}

# row NAME BATCH FLAG...: the base recipe with these flags, once for each seed.
row() {
    local name=$1 batch=$2 seed steps output
    shift 2
    ALL+=("$name=$OUT/$name")
    [ -z "$ROWS" ] || [[ " $ROWS " == *" $name "* ]] || return 0
    mkdir -p "$OUT/$name"
    steps=$(measure "$name" "$batch" "$@")
    for seed in $(seq "$SEEDS"); do
        output=$OUT/$name/seed-$seed
        train "$output" "$steps" "$batch" --seed "$seed" "$@"
        [ -f "$output/probe.json" ] || "$PYTHON" tools/probe.py --checkpoint "$output" \
            --data "$DATA" --sequence-length "$LENGTH" --output "$output/probe.json" \
            --samples "${PROBED:-4096}" --head-samples 64
        [ -z "${BLIMP:-}" ] || [ -f "$output/blimp.json" ] || "$PYTHON" tools/probe.py \
            --checkpoint "$output" --minimal-pairs "$BLIMP" --output "$output/blimp.json"
    done
}

row base 16
for rate in 0.0005 0.002 0.004; do row adamw-$rate 16 --learning-rate $rate; done
for rate in 0.001 0.003 0.01; do
    row lamb-$rate 16 --learning-rate $rate --deepspeed_config $LAMB
done
row batch-8 8
row batch-32 32 --learning-rate 0.0014
row batch-64 64 --learning-rate 0.002
row half-length 32 --sequence-length $((LENGTH / 2))
row mask-20 16 --masked-fraction 0.2
row mask-30 16 --masked-fraction 0.3
row ngram-1 16 --max-ngram 1
row depth 16 --depth-schedule 2@0,3@40%,6@70%
row layers-3 16 --num-layers 3
row layers-12 16 --num-layers 12
row width-128 16 --hidden-size 128 --learning-rate 0.002
row width-384 16 --hidden-size 384 --num-heads 6
row none 16 --sharing none
row dropout 16 --dropout 0.1
row no-pairs 16 --objective none

for name in $ROWS; do
    [[ " ${ALL[*]}" == *" $name="* ]] || stop "ROWS: $name is none of ${ALL[*]%%=*}"
done
rows=()
for pair in "${ALL[@]}"; do [ -d "${pair#*=}" ] && rows+=("$pair"); done
"$PYTHON" tools/lab/sharing_table.py --rows "${rows[@]}" --output "$OUT/table.json"
