# Sourced by every table: pretrain a row, fine-tune it on the paper's five tasks, print the table.
#
#   DATA=shards TASKS=tasks bash slurm/ablations/table4.sh
#   TASKS=tasks ROWS=all-768 sbatch slurm/ablations/paper.sh table4      # on a Slurm cluster
#
# DATA   folder of shards (albert-ds shards)
# TASKS  folder with squad1/ squad2/ MNLI/ SST-2/ RACE/, files as published
#        (tools/demo/small_tasks.py makes one for a small machine)
# ONLY   names of those folders, where not all five are wanted: ONLY='squad1 RACE'
# OUT    folder of the results (default: ablations/<table>); the same command continues there
# SCALE  tiny (default): albert-tiny shapes and few steps, minutes a row on a CPU; shows the machinery
#        paper: the paper's sizes, batch and steps, started with srun by slurm/common.sh
# ROWS   names of the rows to run (default: all); the table prints what is there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
SCALE=${SCALE:-tiny}
OUT=${OUT:-ablations/$(basename "$0" .sh)}
ROWS=${ROWS:-}
ROWS=${ROWS//[[:space:]]/ } # names may stand on lines of their own
ALL=()

stop() {
    echo "ablations: $*" >&2
    exit 2
}

case $SCALE in
    tiny)
        PYTHON=${PYTHON:-.venv/bin/python}
        RECIPE=(--steps "${STEPS:-40}" --batch-size 16 --micro-batch-size 16 --sequence-length 64
            --learning-rate 0.002 --deepspeed_config ds_configs/zero1_fp32_adamw.json
            --eval-every "${STEPS:-40}" --eval-samples 512)
        JUDGE=(--steps "${JUDGE_STEPS:-10}" --eval-every "${JUDGE_STEPS:-10}" --batch-size 8
            --learning-rate 5e-4 --sequence-length 64
            --seeds "${SEEDS:-1}")
        pretrain() { "$PYTHON" -m albert_ds train --output "$OUTPUT" "$@"; }
        finetune() { "$PYTHON" -m albert_ds finetune --output "$OUTPUT" "$@"; }
        run_once() { "$PYTHON" "$@"; }
        ;;
    paper)
        [ -n "${SLURM_JOB_ID:-}" ] || stop "SCALE=paper is for a cluster:" \
            "ROWS=NAME sbatch slurm/ablations/paper.sh $(basename "$0" .sh)"
        . slurm/common.sh
        RECIPE=(--steps 125000 --batch-size 4096 --micro-batch-size "${MICRO:-16}"
            --learning-rate 0.00176 --deepspeed_config ds_configs/zero1_bf16.json)
        JUDGE=(--seeds "${SEEDS:-5}" --deepspeed_config ds_configs/zero1_bf16_adamw.json)
        ;;
    *) stop "SCALE=$SCALE: must be tiny or paper" ;;
esac
[ $# = 0 ] || stop "$1: a table takes no flags, but variables: see slurm/ablations/common.sh"
[ -n "${DATA:-}" ] || stop "DATA is not set: the folder of shards"
[ -n "${TASKS:-}" ] || stop "TASKS is not set: the folder of the tasks' folders"
for folder in ${ONLY:=squad1 squad2 MNLI SST-2 RACE}; do
    case $folder in
        squad1 | squad2 | MNLI | SST-2 | RACE) ;;
        *) stop "ONLY: $folder is none of squad1 squad2 MNLI SST-2 RACE" ;;
    esac
    [ -d "$TASKS/$folder" ] || stop "$TASKS/$folder is missing; ONLY='squad1 ...' takes only some"
done

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

wanted() { [ -z "$ROWS" ] || [[ " $ROWS " == *" $1 "* ]]; }

# row NAME FLAG...: pretrain with these flags, then fine-tune on the tasks. All ranks of a job
# pretrain; those of one node fine-tune, because the batches of the tasks are small.
row() {
    local name=$1 folder task
    shift
    ALL+=("$name=$OUT/$name")
    wanted "$name" || return 0
    OUTPUT=$OUT/$name/run
    pretrain --data "$DATA" "${RECIPE[@]}" "$@"
    for folder in $ONLY; do
        case $folder in
            MNLI) task=glue/mnli ;;
            SST-2) task=glue/sst2 ;;
            *) task=${folder,,} ;;
        esac
        OUTPUT=$OUT/$name/${task#*/}
        num_nodes=1 finetune --task "$task" --data "$TASKS/$folder" --checkpoint "$OUT/$name/run" \
            "${JUDGE[@]}"
    done
}

# probe NAME: the intrinsic tasks of a row.
probe() {
    wanted "$1" || return 0
    run_once -m albert_ds probe --checkpoint "$OUT/$1/run" --data "$DATA" \
        --sequence-length "$(at 512 64)" --output "$OUT/$1/probe.json" \
        --samples "$(at 4096 256)" --head-samples "$(at 65536 512)"
}

# Whether the row has been pretrained; another job may be at it.
ended() { grep -qs '"code": 0' "$OUT/$1/run/exit.json"; }

# table FLAG...: the rows that there are, in the paper's layout; at small scale, where tasks say
# little, with what pretraining has reached.
table() {
    local rows=() pair name
    for name in $ROWS; do
        [[ " ${ALL[*]}" == *" $name="* ]] || stop "ROWS: $name is none of ${ALL[*]%%=*}"
    done
    [ "$SCALE" = paper ] || set -- --heldout "$@"
    for pair in "${ALL[@]}"; do
        name=${pair%%=*}
        if ended "$name"; then
            rows+=("$pair")
        elif [ -d "$OUT/$name" ]; then
            echo "ablations: $name is left out of the table: its run has not ended" >&2
        fi
    done
    "$PYTHON" tools/lab/paper_table.py --rows "${rows[@]}" --output "$OUT/table.json" "$@"
}
