#!/bin/bash
# Which recipe learns most on this machine in a given time? Every row trains for as long, on one CPU
# core, over seeds: its speed is measured first, and the steps follow from it. The row `base` is what
# albert-ds learn trains, with its smallest batch; every other row changes one thing of it, and what
# has to change with it.
# Prints a table, and one of the differences from `base` (AGAINST), seed by seed. Rows with other masks
# or lengths have a held-out loss of their own; bits a byte and accuracies are probe.py's, with the same
# masks for every row. Rows of different vocabularies (DATA) compare by neither, but by
# tools/lab/same_words.py.
# The row `half-then-full` starts from the models of `half-length` and trains for MINUTES more; the
# table counts what both took.
#
#   DATA=shards bash slurm/ablations/recipe.sh
#   DATA=shards SEEDS=3 ROWS='base nsp no-pairs' bash slurm/ablations/recipe.sh     # Table 5
#   DATA=shards SEEDS=3 ROWS='base share-attention share-ffn share-none share-none-narrow' \
#       bash slurm/ablations/recipe.sh                                              # Table 4
#
# DATA     folder of shards (tools/build_shards.py)
# LENGTH   tokens of a sample (default: 128), at most those of the shards
# BLIMP    folder of minimal pairs for tools/probe.py (default: left out)
# PROBED   held-out samples for tools/probe.py (default: 4096); half as many train a missing head
# OUT      folder of the results (default: ablations/recipe); the same command continues there
# MINUTES  of each run (default: 20), by the speed of 100 steps before the row's first run: a machine
#          that does other work then gives the row fewer steps. STEPS=N takes N steps of 32 samples
#          instead, or as many samples in larger or smaller ones
# CONFIG   for DeepSpeed (default: ds_configs/zero1_fp32_muon.json; zero1_bf16_muon.json is faster
#          on CPUs with matrix units); the rows of AdamW and LAMB take the files beside it
# SEEDS    number of seeds of each row (default: 2); SEED=N trains this seed alone, and prints no table
# FLAGS    further flags of the trainer, for all rows
# ROWS     names of the rows to run (default: all); the table prints every row that has ended
# AGAINST  name of the row that the others are compared with (default: base)
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-.venv/bin/python} OUT=${OUT:-ablations/recipe}
LENGTH=${LENGTH:-128} MINUTES=${MINUTES:-20} SEEDS=${SEEDS:-2} ROWS=${ROWS:-}
ROWS=${ROWS//[[:space:]]/ } # names may stand on lines of their own
PROBED=${PROBED:-4096} AGAINST=${AGAINST:-base}
ALL=() PLAN=()
TRIAL=100 # steps that are timed, in intervals of 5; they run through a row's depth schedule

stop() {
    echo "ablations: $*" >&2
    exit 2
}
[ $# = 0 ] || stop "$1: set FLAGS; all variables are in the head of $0"
[ -n "${DATA:-}" ] || stop "DATA is not set: the folder of shards"

MUON=${CONFIG:-ds_configs/zero1_fp32_muon.json}
ADAMW=${MUON/_muon/_adamw} LAMB=${MUON/_muon/}
[ "$LAMB" != "$MUON" ] || stop "CONFIG=$MUON: must end in _muon.json, beside the same for others"
[[ $MUON == *bf16* ]] && PRECISION=bf16 || PRECISION=fp32
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
read -ra FLAGS <<< "${FLAGS:-}"
BASE=(--config recipes/small.yaml --sequence-length "$LENGTH" --deepspeed_config "$MUON" "${FLAGS[@]}")

train() { # FOLDER STEPS BATCH FLAG...
    local folder=$1 steps=$2 batch=$3 every=$(($2 > 20 ? $2 / 20 : 1))
    local start=${folder%/*}/start-${folder##*/} # no run begins inside its own output
    shift 3
    while [[ "$*" =~ \{steps\*([0-9]+)/100\} ]]; do
        set -- "${@//"${BASH_REMATCH[0]}"/$((steps * BASH_REMATCH[1] / 100))}"
    done
    set -- --data "$DATA" --steps "$steps" "${BASE[@]}" --batch-size "$batch" \
        --micro-batch-size "$batch" --warmup-steps $((steps / 10)) --log-every "$every" \
        --eval-every "$every" --eval-samples 1024 "$@"
    if [[ $folder != "$OUT"/random-start/* && " $* " != *' --init-from '* ]]; then
        [ -f "$start/config.json" ] || "$PYTHON" -m albert_lab.neighbours "$@" --output "$start"
        set -- "$@" --init-from "$start"
    fi
    "$PYTHON" albert_ds/train.py "$@" --output "$folder"
}

# measure NAME BATCH FLAG...: the steps that fit into MINUTES, measured once.
measure() {
    local file=$OUT/$1/steps name=$1 batch=$2
    shift 2
    if [ -n "${STEPS:-}" ]; then echo $((STEPS * 32 / batch)); return; fi
    if [ ! -s "$file" ]; then
        rm -rf "$OUT/$name/trial" "$OUT/$name/start-trial"
        train "$OUT/$name/trial" $TRIAL "$batch" "$@" --log-every 5 --eval-every $TRIAL >&2
        "$PYTHON" - "$OUT/$name/trial/metrics.jsonl" "$MINUTES" > "$file.tmp" <<'PY'
import json, sys
records = [json.loads(line) for line in open(sys.argv[1])]
seconds = [r["step_seconds"] for r in records if "step_seconds" in r]
seconds[:4] = seconds[4:8]  # 20 steps warm up, of the 40 that a depth schedule begins with
print(max(20, int(60 * float(sys.argv[2]) * len(seconds) / sum(seconds))))
PY
        mv "$file.tmp" "$file"
        rm -rf "$OUT/$name/trial" "$OUT/$name/start-trial"
    fi
    cat "$file"
}

# row NAME BATCH FLAG...: a row is the base recipe with these flags, where {out} becomes OUT, {seed}
# the seed of the run, and {steps*N/100} N percent of its steps. --muon EDIT, before all flags: the
# run's JSON is CONFIG, edited by this command of sed.
row() {
    ALL+=("$1=$OUT/$1")
    PLAN+=("$*")
}

# train_row NAME BATCH FLAG...: the row, if it is asked for, once for each seed.
train_row() {
    local name=$1 batch=$2 seed steps output average=()
    shift 2
    [ -z "$ROWS" ] || [[ " $ROWS " == *" $name "* ]] || return 0
    mkdir -p "$OUT/$name"
    if [ "${1:-}" = --muon ]; then
        sed "$2" "$MUON" > "$OUT/$name/muon.json"
        ! cmp -s "$MUON" "$OUT/$name/muon.json" || stop "$name: nothing in $MUON to edit by $2"
        set -- --deepspeed_config "$OUT/$name/muon.json" "${@:3}"
    fi
    set -- "${@//'{out}'/$OUT}"
    steps=$(measure "$name" "$batch" "${@//'{seed}'/1}")
    [[ " $* " != *' --average '* ]] || average=(--average)
    for seed in ${SEED:-$(seq "$SEEDS")}; do
        output=$OUT/$name/seed-$seed
        train "$output" "$steps" "$batch" --seed "$seed" "${@//'{seed}'/$seed}"
        [ -f "$output/probe.json" ] || "$PYTHON" tools/probe.py --checkpoint "$output" \
            "${average[@]}" --data "$DATA" --sequence-length "$LENGTH" --output "$output/probe.json" \
            --samples "$PROBED" --head-samples $((PROBED / 2))
        [ -z "${BLIMP:-}" ] || [ -f "$output/blimp.json" ] || "$PYTHON" tools/probe.py \
            --checkpoint "$output" "${average[@]}" --minimal-pairs "$BLIMP" --precision "$PRECISION" \
            --output "$output/blimp.json"
    done
}

row base 32
for rate in 0.001 0.002 0.004 0.008; do row rate-$rate 32 --learning-rate $rate; done
for rate in 0.001 0.006; do # of the embeddings and heads, which AdamW updates
    row adam-rate-$rate 32 --muon "s/\"lr\":.*/&\"adam_lr\":$rate,/"
done
row matrix-rate-0.006 32 --muon 's/"lr":.*/&"adam_lr":0.003,/' --learning-rate 0.006
for beta in 0.95 0.999; do row adam-beta-$beta 32 --muon "s/0.99],/$beta],/"; done
row momentum-0.9 32 --muon s/0.95,/0.9,/
for rate in 0.0005 0.001 0.002 0.003; do
    row adamw-$rate 32 --learning-rate $rate --deepspeed_config "$ADAMW"
done
for rate in 0.001 0.003 0.01 0.02; do
    row lamb-$rate 32 --learning-rate $rate --deepspeed_config "$LAMB"
done
row wsd 32 --learning-rate-schedule wsd
for percent in 2 20; do row warmup-$percent 32 --warmup-steps "{steps*$percent/100}"; done
row average 32 --average 0.999
row random-start 32
row batch-16 16 --learning-rate 0.002
row batch-64 64
row batch-128 128
row batch-16-32-64 36 --batch-size 16@0,32@35%,64@70% --micro-batch-size 16
row half-length 64 --sequence-length $((LENGTH / 2))
row half-then-full 32 --init-from '{out}/half-length/seed-{seed}'
row length-rising 32 --sequence-length $((LENGTH / 2))@0,$LENGTH@50% \
    --batch-size 64@0,32@50% --micro-batch-size 32
for share in 0.15 0.2 0.45; do row mask-$share 32 --masked-fraction $share; done
row mask-falling 32 --masked-fraction 0.3..0.15@100%
row ngram-3 32 --max-ngram 3
row layers-2 32 --num-layers 2
row layers-2-3 32 --depth-schedule 2@0,3@40%
row layers-6 32 --num-layers 6
row layers-3-6 32 --num-layers 6 --depth-schedule 3@0,6@40%
row layers-2-3-6 32 --num-layers 6 --depth-schedule 2@0,3@40%,6@70%
NARROW="--hidden-size 128 --embedding-size 128"
row width-128 32 $NARROW
row width-128-layers-3-6 32 $NARROW --num-layers 6 --depth-schedule 3@0,6@40%
row width-384 32 --hidden-size 384 --num-heads 6
row width-512 32 --hidden-size 512 --num-heads 8
# The paper's Tables 3, 4, 5 and 8. Narrow layers that share nothing have as many parameters as the
# shared ones.
for width in 32 64 128; do row embedding-$width 32 --embedding-size $width; done
for sharing in attention ffn none; do row share-$sharing 32 --sharing $sharing; done
row share-none-narrow 32 --sharing none --hidden-size 192 --embedding-size 192
row nsp 32 --objective nsp
row no-pairs 32 --objective none
# The sentence loss only in the last third: one falling rate in two runs.
row late-pairs-before 32 --objective none --steps '{steps*67/100}' --final-rate 0.33
row late-pairs 32 --init-from '{out}/late-pairs-before/seed-{seed}' --steps '{steps*33/100}' \
    --learning-rate 0.001 --warmup-steps 10
row dropout 32 --dropout 0.1

for name in $ROWS "$AGAINST"; do
    [[ " ${ALL[*]}" == *" $name="* ]] || stop "ROWS or AGAINST: $name is none of ${ALL[*]%%=*}"
done
for planned in "${PLAN[@]}"; do
    read -ra words <<< "$planned"
    train_row "${words[@]}"
done
[ -z "${SEED:-}" ] || exit 0
rows=() against=()
for pair in "${ALL[@]}"; do
    name=${pair%%=*} folder=${pair#*=}
    [ -d "$folder" ] || continue
    begun=$(find "$folder" -maxdepth 1 -name 'seed-*' | wc -l)
    ended=$(find "$folder" -path '*/seed-*/probe.json' | wc -l)
    if [ "$begun" = 0 ] || [ "$ended" != "$begun" ]; then # another recipe.sh may be at it
        echo "ablations: $name is left out of the table: $ended of $begun runs have ended" >&2
        continue
    fi
    rows+=("$pair")
    [ "$name" != "$AGAINST" ] || against=(--against "$AGAINST")
done
[ ${#rows[@]} -gt 0 ] || exit 0
"$PYTHON" tools/lab/sharing_table.py --rows "${rows[@]}" "${against[@]}" --output "$OUT/table.json"
