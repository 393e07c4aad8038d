#!/bin/bash
# What layers share, and what they have of their own: patterns and additions at equal parameters,
# at equal FLOPs and at equal time, over seeds. Prints one table.
#
#   DATA=shards bash slurm/ablations/sharing.sh
#   DATA=shards ROWS=cycle-2 sbatch slurm/ablations/paper.sh sharing     # on a Slurm cluster
#
# DATA   folder of shards (albert-ds shards)
# BLIMP  folder of minimal pairs for albert-ds probe (default: left out)
# OUT    folder of the results (default: ablations/sharing); the same command continues there
# SCALE  tiny (default): 6 layers of width 64, 2,000 steps of 16, some minutes a run on a CPU core
#        paper: ALBERT-base, 125,000 steps of 4096, in a Slurm job (slurm/common.sh)
# LENGTH tokens of a sample at small scale (default: 64), at most those of the shards
# SEEDS  number of seeds of each row (default: 3)
# ROWS   names of the rows to run (default: all); the table prints what is there
set -euo pipefail
SCALE=${SCALE:-tiny} SEEDS=${SEEDS:-3} ROWS=${ROWS:-}
ROWS=${ROWS//[[:space:]]/ } # names may stand on lines of their own
ALL=()

stop() {
    echo "ablations: $*" >&2
    exit 2
}

case $SCALE in
    tiny)
        cd "$(dirname "${BASH_SOURCE[0]}")/../.."
        PYTHON=${PYTHON:-.venv/bin/python}
        STEPS=${STEPS:-2000}
        RECIPE=(--model albert-tiny --hidden-size 64 --num-layers 6 --steps "$STEPS" --batch-size 16
            --micro-batch-size 16 --sequence-length "${LENGTH:-64}" --dropout 0
            --learning-rate 0.002 --warmup-steps $((STEPS / 10))
            --deepspeed_config ds_configs/zero1_fp32_adamw.json
            --eval-every $((STEPS > 10 ? STEPS / 10 : 1)) --eval-samples 1024)
        pretrain() { "$PYTHON" -m albert_ds train --output "$OUTPUT" "$@"; }
        run_once() { "$PYTHON" "$@"; }
        ;;
    paper)
        [ -n "${SLURM_JOB_ID:-}" ] || stop "SCALE=paper is for a Slurm job: see the head of $0"
        . "${SLURM_SUBMIT_DIR:-.}/slurm/common.sh"
        RECIPE=(--model albert-base --steps 125000 --batch-size 4096
            --micro-batch-size "${MICRO:-16}" --learning-rate 0.00176
            --deepspeed_config ds_configs/zero1_bf16.json --eval-every 2500)
        ;;
    *) stop "SCALE=$SCALE: must be tiny or paper" ;;
esac
[ $# = 0 ] || stop "$1: the study takes no flags, but variables: see the head of $0"
[ -n "${DATA:-}" ] || stop "DATA is not set: the folder of shards"
OUT=${OUT:-ablations/sharing}

# row NAME FLAG...: pretrain with these flags, once for each seed.
row() {
    local name=$1 seed
    shift
    ALL+=("$name=$OUT/$name")
    [ -z "$ROWS" ] || [[ " $ROWS " == *" $name "* ]] || return 0
    for seed in $(seq "$SEEDS"); do
        OUTPUT=$OUT/$name/seed-$seed
        pretrain --data "$DATA" "${RECIPE[@]}" --seed "$seed" "$@"
        [ -z "${BLIMP:-}" ] || [ -f "$OUTPUT/blimp.json" ] || run_once -m albert_ds probe \
            --checkpoint "$OUTPUT" --minimal-pairs "$BLIMP" --output "$OUTPUT/blimp.json"
    done
}

for blocks in 2 3; do # as many parameters in another order
    for pattern in groups cycle cycle-rev; do
        row $pattern-$blocks --sharing $pattern:$blocks
    done
done
for sharing in all attention ffn none; do row $sharing --sharing $sharing; done
for own in norm scale position lora:4 norm,lora:4; do row all+$own --sharing all --per-layer $own; done
# A core between layers of its own: throughout, and run once until a third of the steps is done.
if [ "$SCALE" = paper ]; then loop=2,4x2,2 once=8 all=12; else loop=1,2x2,1 once=4 all=6; fi
row loop --sharing loop:$loop
row loop-late --sharing loop:$loop --depth-schedule $once@0,$all@35%
row loop-late+inject --sharing loop:$loop --depth-schedule $once@0,$all@35% --per-layer inject
# Layers at the start, and from which share of the steps on how many: 55 to 65 % of the blocks' FLOPs.
if [ "$SCALE" = paper ]; then each=2; else each=1; fi # of 12 layers and of 6
depth() { # NAME LAYERS@START..., of 6 layers
    local name=$1 part schedule=''
    shift
    for part; do schedule+=,$((each * ${part%@*}))@${part#*@}; done
    row "$name" --sharing all --depth-schedule "${schedule#,}"
}
depth depth-2-3-6 2@0 3@40% 6@70%
depth depth-3-6 3@0 6@70%
depth depth-2-6 2@0 6@60%
depth depth-1-6 1@0 6@50%
depth depth-1-2-3-6 1@0 2@20% 3@40% 6@70%

for name in $ROWS; do
    [[ " ${ALL[*]}" == *" $name="* ]] || stop "ROWS: $name is none of ${ALL[*]%%=*}"
done
rows=() against=()
for pair in "${ALL[@]}"; do
    folder=${pair#*=}
    [ -d "$folder" ] || continue
    begun=$(find "$folder" -maxdepth 1 -name 'seed-*' | wc -l)
    ended=$(grep -ls '"code": 0' "$folder"/seed-*/exit.json | wc -l || true)
    if [ "$ended" != "$begun" ]; then # another job may be at it
        echo "ablations: ${pair%%=*} is left out of the table: $ended of $begun runs have ended" >&2
        continue
    fi
    rows+=("$pair")
    [ "$folder" != "$OUT/all" ] || against=(--against all)
done
"$PYTHON" tools/lab/sharing_table.py --rows "${rows[@]}" "${against[@]}" \
    --output "$OUT/table.json"
