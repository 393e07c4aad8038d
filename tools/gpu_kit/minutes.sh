#!/usr/bin/env bash
# A small ALBERT in the minutes for which one GPU is lent; with Slurm: sbatch --gpus=1 this file.
#     DATA="shards more-shards" MINUTES=8 OUT=kept bash tools/gpu_kit/minutes.sh
# It times a step, takes the steps that fit, pretrains, exports in bf16 and scores the export until
# the minutes are over. The same command goes on with WORK: what is timed or trained is not again.
#
# DATA     folders of shards (albert-ds shards) of LENGTH (128) tokens and PIECES (12000) pieces
# MINUTES  of everything, from the first line to the last (default: 8); SCORES seconds of them are
#          for export and scores (default: 60; with TASKS 90)
# OUT      what is worth keeping, in files of at most 15 MiB (default: minutes): model.tar.NN are
#          parts of the Hugging Face folder (cat them), results.tar.gz has metrics, scores and logs
# WORK     the run and all else (default: OUT/work)
# PAIRS    folder of minimal pairs, TASKS folder of GLUE to fine-tune on (default: left out)
# FIRST    1: time a step, and stop. Then another call has the minutes for itself
# FLAGS    further flags of the trainer; QUICK=1: a tiny model and 20 steps, which show that it runs
set -uo pipefail
SECONDS=0
say() { echo "minutes: $(printf %3d $SECONDS) s: $*"; }
refuse() { echo "minutes: $*" >&2; exit 2; }

cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../..}" || exit 2
PY=${PY:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
MINUTES=${MINUTES:-8} OUT=${OUT:-minutes} LENGTH=${LENGTH:-128} PIECES=${PIECES:-12000}
WORK=${WORK:-$OUT/work} PAIRS=${PAIRS:-} TASKS=${TASKS:-} QUICK=${QUICK:-}
PACK=8 # seconds to pack the results
SCORES=${SCORES:-$([ -n "$TASKS" ] && echo 90 || echo 60)}
BATCH=1024 MICRO=${MICRO:-1024} TRIAL=60 WARMUP=200
# docs/learning.md says why.
DEPTHS=3@0,6@25%,12@60%
SIZE=(--model albert-tiny --embedding-size 128 --hidden-size 512 --num-heads 8 --num-layers 12)
RECIPE=(--dropout 0 --max-ngram 1 --masked-fraction 0.3@0,0.3@60%..0.15@100% --learning-rate 0.003)
if [ -n "$QUICK" ]; then
    BATCH=8 MICRO=$((MICRO < 8 ? MICRO : 8)) TRIAL=12 WARMUP=2 DEPTHS=1@0,2@50%
    SIZE=(--model albert-tiny --embedding-size 32 --hidden-size 64 --num-heads 1 --num-layers 2)
fi
read -ra DATA <<< "${DATA:-}"
read -ra FLAGS <<< "${FLAGS:-}"
[ ${#DATA[@]} -gt 0 ] || refuse "DATA is not set: the folders of shards"
[[ $MINUTES =~ ^[0-9]+(\.[0-9]+)?$ ]] || refuse "MINUTES=$MINUTES: must be a number"
TOTAL=$(awk "BEGIN {print int(60 * $MINUTES)}")
left() { echo $((TOTAL - PACK - SECONDS > 0 ? TOTAL - PACK - SECONDS : 0)); }

export PYTHONPATH=$PWD:$PWD/tools${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$PY" - "$LENGTH" "$PIECES" "${DATA[@]}" <<'CODE' || exit 2
import sys
from albert_ds.data.shards import open_shards
from albert_ds.base.errors import DamagedData, UserError
length, pieces, *folders = sys.argv[1:]
for folder in folders:
    try:
        source = open_shards(folder, "train")
    except (UserError, DamagedData) as error:
        sys.exit(f"minutes: DATA: {error}")
    found = f"{source.sequence_length} tokens and {source.vocab.size} pieces"
    if found != f"{length} tokens and {pieces} pieces":
        sys.exit(f"minutes: DATA {folder}: has {found}; must be {length} and {pieces} (LENGTH, PIECES)")
CODE
mkdir -p "$OUT" "$WORK/scores" || exit 2
ulimit -n "$(ulimit -Hn)" # a loader's micro-batches are open files

pack() {
    (cd "$WORK" && tar czf results.tar.gz --ignore-failed-read speed steps *.log scores \
        run/metrics.jsonl run/config.json run/history.jsonl 2> /dev/null)
    mv "$WORK/results.tar.gz" "$OUT/results.tar.gz"
}

# train LIMIT FOLDER STEPS MICRO WARMUP FLAG...: after LIMIT seconds it saves and ends; a hung one
# is killed.
train() {
    local limit=$1 folder=$2 steps=$3 micro=$4 warmup=$5
    shift 5
    set -- "${SIZE[@]}" "${RECIPE[@]}" --data "${DATA[@]}" --sequence-length "$LENGTH" \
        --depth-schedule "$DEPTHS" --steps "$steps" --warmup-steps "$warmup" \
        --batch-size "$BATCH" --micro-batch-size "$micro" --num-workers "${WORKERS:-8}" \
        --deepspeed_config ds_configs/zero1_bf16_muon.json "$@" "${FLAGS[@]}"
    [ -f "$WORK/start/config.json" ] ||
        "$PY" -m albert_lab.neighbours "$@" --output "$WORK/start" || return
    timeout --preserve-status --kill-after=15 $((limit > 1 ? limit : 1)) \
        "$PY" -m albert_ds train "$@" --init-from "$WORK/start" --output "$folder"
}

# The seconds of a step, the mean over the depths; half the micro-batch where the memory is short.
while [ ! -s "$WORK/speed" ]; do
    rm -rf "$WORK/trial"
    train "$(left)" "$WORK/trial" $TRIAL "$MICRO" 5 --log-every 1 --eval-every $TRIAL --eval-samples 8 \
        --save-every $((2 * TRIAL)) > "$WORK/trial.log" 2>&1
    code=$?
    if [ $code = 2 ] && grep -q 'out of GPU memory' "$WORK/trial.log" && [ $((MICRO % 2)) = 0 ]; then
        say "micro-batches of $((MICRO / 2)): $MICRO do not fit into the GPU's memory; a step still has $BATCH sequences"
        MICRO=$((MICRO / 2))
        continue
    fi
    [ $code = 0 ] || pack
    [ $code = 0 ] || refuse "the trial ended with $code: $(tail -n 1 "$WORK/trial.log")"
    "$PY" - "$WORK/trial/metrics.jsonl" "$DEPTHS" "$TRIAL" "$MICRO" > "$WORK/speed.part" <<'CODE' || exit 1
import json, sys
from statistics import median
path, depths, trial, micro = sys.argv[1:]
records = [json.loads(line) for line in open(path)]
seconds = {r["step"]: r["step_seconds"] for r in records if "step_seconds" in r}
starts = [float(part.split("@")[1].rstrip("%")) / 100 for part in depths.split(",")] + [1]
mean = 0
for begin, end in zip(starts, starts[1:]):
    steps = range(round(begin * int(trial)) + 1, round(end * int(trial)) + 1)
    mean += (end - begin) * median(seconds[n] for n in steps[len(steps) // 2 :])  # the first warm up
print(mean, micro)
CODE
    mv "$WORK/speed.part" "$WORK/speed"
done
read -r STEP MICRO < "$WORK/speed"
say "a step of $BATCH sequences takes $STEP s, the mean of depths $DEPTHS, in micro-batches of $MICRO"
[ -z "${FIRST:-}" ] || { pack; exit 0; }

if [ ! -s "$WORK/steps" ]; then
    # 20 s to start and to evaluate; 4 % for checkpoints and what the trial did not see.
    spare=$(($(left) - SCORES - 20))
    steps=$(awk "BEGIN {print int($spare * 0.96 / $STEP)}")
    [ -z "$QUICK" ] || steps=20
    [ "$steps" -ge 20 ] || refuse "MINUTES=$MINUTES: $spare s are left to train, $steps steps of $STEP s;" \
        "must be 20 or more beside SCORES=$SCORES seconds"
    echo "$steps" > "$WORK/steps"
fi
steps=$(cat "$WORK/steps") every=$(((steps + 9) / 10))
warmup=$((steps / 5 < WARMUP ? steps / 5 : WARMUP))
say "pretraining: $steps steps"
train $(($(left) - SCORES)) "$WORK/run" "$steps" "$MICRO" \
    $((steps / 40 > warmup ? steps / 40 : warmup)) --log-every 20 --eval-every $every \
    --eval-samples 1024 --save-every $every --keep-last 10 > "$WORK/train.log" 2>&1
code=$?
newest=$(ls -d "$WORK"/run/checkpoints/step-* 2> /dev/null | tail -n 1)
[ -n "$newest" ] || { pack; refuse "no checkpoint, the training ended with $code: $(tail -n 1 "$WORK/train.log")"; }
say "$(grep '^step ' "$WORK/train.log" | tail -n 1)"
[ $code = 0 ] || say "the training ended with $code ($(tail -n 1 "$WORK/train.log")): the newest whole checkpoint is exported"

# A run whose loss has risen without an infinite gradient: the best checkpoint that was evaluated.
CHECKPOINT=$("$PY" - "$WORK/run" <<'CODE'
import json, sys
from pathlib import Path
run = Path(sys.argv[1])
found, metrics = {}, run / "metrics.jsonl"
for line in metrics.read_text().splitlines() if metrics.is_file() else ():
    record = json.loads(line)
    loss, step = record.get("heldout_mlm_loss"), record["step"]
    if loss is not None and (run / "checkpoints" / f"step-{step:08}").is_dir():
        found[step] = loss
best = min(found, key=found.get, default=None)
is_worse = best is not None and found[max(found)] > found[best] + 0.1
print(run / "checkpoints" / f"step-{best:08}" if is_worse else run)
CODE
)
[ "$CHECKPOINT" = "$WORK/run" ] ||
    say "the held-out loss has risen since then by over 0.1: ${CHECKPOINT##*/} is exported"

pack
rm -f "$OUT"/model.tar.*
if "$PY" -m albert_ds export --checkpoint "$CHECKPOINT" --output "$WORK/model" --precision bf16 \
    ${LICENCE:+--license "$LICENCE"} > "$WORK/export.log" 2>&1; then
    tar cf - -C "$WORK" model | split -b 15M -d - "$OUT/model.tar."
    say "exported: $(du -b "$WORK/model/model.safetensors" | cut -f 1) bytes of weights"
else
    say "not exported ($(tail -n 1 "$WORK/export.log")): the newest checkpoint's weights are packed as they are"
    (cd "$WORK/run" && tar cf - config.json spiece.model tokenizer_config.json \
        "checkpoints/${newest##*/}"/{weights.safetensors,state.json}) | split -b 15M -d - "$OUT/model.tar."
    pack
    exit 1
fi

# What scores the export shares the GPU until the minutes are over.
score() { # NAME COMMAND...
    local name=$1
    shift
    timeout --kill-after=3 "$(left)" "$PY" -m albert_ds "$@" > "$WORK/scores/$name.log" 2>&1 ||
        echo "$name: ended with $?: $(tail -n 1 "$WORK/scores/$name.log")" >> "$WORK/scores/failed"
}
rm -f "$WORK/scores/failed"
score probe probe --checkpoint "$WORK/model" --data "${DATA[0]}" --micro-batch-size 128 \
    --output "$WORK/scores/probe.json" ${QUICK:+--samples 16} &
[ -z "$PAIRS" ] || score pairs probe --checkpoint "$WORK/model" --minimal-pairs "$PAIRS" \
    --precision bf16 --output "$WORK/scores/pairs.json" &
if [ -n "$TASKS" ]; then
    # Without MPS processes that share a GPU take turns, each while it waits for its own host.
    if command -v nvidia-cuda-mps-control > /dev/null && [ -z "$QUICK" ]; then
        export CUDA_MPS_PIPE_DIRECTORY=$WORK/mps CUDA_MPS_LOG_DIRECTORY=$WORK/mps
        mkdir -p "$WORK/mps" && nvidia-cuda-mps-control -d > "$WORK/mps.log" 2>&1 || unset CUDA_MPS_PIPE_DIRECTORY
    fi
    while read -r task folder count batch; do
        [ -d "$TASKS/$folder" ] || { say "TASKS $TASKS: no $folder in it; left out"; continue; }
        for seed in 0 1 2; do
            score "$task-$seed" finetune --task "glue/$task" --data "$TASKS/$folder" --seed $seed \
                --checkpoint "$WORK/model" --output "$WORK/tasks/$task-$seed" --dropout 0 \
                --steps "$([ -n "$QUICK" ] && echo 2 || echo "$count")" --batch-size "$batch" \
                --deepspeed_config ds_configs/zero1_bf16_adamw.json &
        done
    done <<< "mrpc MRPC 700 16
cola CoLA 800 32
stsb STS-B 1080 16
rte RTE 500 16"
fi
wait
[ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] || echo quit | nvidia-cuda-mps-control > /dev/null 2>&1
for file in "$WORK"/tasks/*/results.json; do
    [ ! -f "$file" ] || cp "$file" "$WORK/scores/$(basename "$(dirname "$file")").json"
done
pack
[ ! -f "$WORK/scores/failed" ] || cat "$WORK/scores/failed"
say "kept in $OUT: $(ls "$OUT" | tr '\n' ' ')"
cat "$WORK"/scores/probe.log | grep '^|\|bits' || true
! [ -f "$WORK/scores/pairs.log" ] || grep '\*\*all\*\*\|pairs/s' "$WORK/scores/pairs.log" || true
