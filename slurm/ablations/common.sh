# Sourced by every table: pretrain a row, fine-tune it on the paper's five tasks, print the table.
#
#   DATA=shards TASKS=tasks bash slurm/ablations/table4.sh
#
# DATA   folder of shards (tools/build_shards.py)
# TASKS  folder with any of squad1/ squad2/ MNLI/ SST-2/ RACE/, files as published
#        (tools/demo/small_tasks.py makes one for a small machine)
# OUT    folder of the results (default: ablations/<table>); the same command continues there
# SCALE  tiny (default): albert-tiny shapes and few steps, minutes a row on a CPU; shows the machinery
#        paper: the paper's sizes, batch and steps, to be run on a cluster, a row at a time (ROWS)
# ROWS   names of the rows to run (default: all); the table prints what is there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
SCALE=${SCALE:-tiny}
OUT=${OUT:-ablations/$(basename "$0" .sh)}
: "${DATA:?the folder of shards}" "${TASKS:?the folder of tasks}"
ALL=()

if [ "$SCALE" = tiny ]; then
    RECIPE=(--steps "${STEPS:-40}" --batch-size 16 --micro-batch-size 16 --sequence-length 64
        --learning-rate 0.002 --deepspeed_config ds_configs/zero1_fp32_adamw.json
        --eval-every "${STEPS:-40}" --eval-samples 512)
    JUDGE=(--steps "${JUDGE_STEPS:-10}" --eval-every "${JUDGE_STEPS:-10}" --batch-size 8
        --learning-rate 5e-4 --sequence-length 64 --question-length 24 --stride 24
        --seeds "${SEEDS:-1}")
else
    RECIPE=(--steps 125000 --batch-size 4096 --micro-batch-size "${MICRO:-16}"
        --learning-rate 0.00176 --deepspeed_config ds_configs/zero1_bf16.json)
    JUDGE=(--seeds "${SEEDS:-5}" --deepspeed_config ds_configs/zero1_bf16_adamw.json)
fi

# The paper's size (Table 1), or a small one of the same kind, in the same order of widths.
size() {
    if [ "$SCALE" = paper ]; then echo "--model $1"; return; fi
    case $1 in
        bert-base) echo "--model albert-tiny --sharing none --embedding-size 128" ;;
        bert-large) echo "--model albert-tiny --sharing none --embedding-size 192 --hidden-size 192 --num-layers 6" ;;
        albert-base) echo "--model albert-tiny" ;;
        albert-large) echo "--model albert-tiny --hidden-size 192 --num-layers 6" ;;
        albert-xlarge) echo "--model albert-tiny --hidden-size 256 --num-layers 6" ;;
        albert-xxlarge) echo "--model albert-tiny --hidden-size 384 --dropout 0" ;;
    esac
}

# A number of the paper, or the one to use at small scale.
at() { if [ "$SCALE" = paper ]; then echo "$1"; else echo "$2"; fi; }

# row NAME FLAG...: pretrain with these flags, then fine-tune on every task there is.
row() {
    local name=$1 code=0
    shift
    ALL+=("$name=$OUT/$name")
    case " ${ROWS:-$name} " in *" $name "*) ;; *) return ;; esac
    "$PYTHON" albert_ds/train.py --data "$DATA" --output "$OUT/$name/run" "${RECIPE[@]}" "$@" ||
        code=$?
    [ $code = 0 ] || [ $code = 75 ] || exit $code # 75: --max-hours is over, which ends a row
    local task folder
    for task in squad1:squad1 squad2:squad2 glue/mnli:MNLI glue/sst2:SST-2 race:RACE; do
        folder=$TASKS/${task#*:}
        task=${task%:*}
        [ -d "$folder" ] || continue
        "$PYTHON" albert_ds/finetune.py --task "$task" --data "$folder" --checkpoint "$OUT/$name/run" \
            --output "$OUT/$name/${task#*/}" --cache "$OUT/features" "${JUDGE[@]}"
    done
}

# probe NAME: the intrinsic tasks of a row.
probe() {
    case " ${ROWS:-$1} " in *" $1 "*) ;; *) return ;; esac
    "$PYTHON" tools/probe.py --checkpoint "$OUT/$1/run" --data "$DATA" --sequence-length "$(at 512 64)" \
        --output "$OUT/$1/probe.json" --samples "$(at 4096 256)" --head-samples "$(at 65536 512)"
}

# table FLAG...: the rows that there are, in the paper's layout; at small scale, where tasks say
# little, with what pretraining has reached.
table() {
    local rows=() pair
    [ "$SCALE" = paper ] || set -- --heldout "$@"
    for pair in "${ALL[@]}"; do [ -d "${pair#*=}" ] && rows+=("$pair"); done
    "$PYTHON" tools/lab/paper_table.py --rows "${rows[@]}" --output "$OUT/table.json" "$@"
}
