#!/usr/bin/env bash
# The GPU machine's one command:  bash .whl/run.sh [SECONDS] [STAGE ...]
# Stages run in the order of their worth, each with its own limit; one that fails stops nothing.
# Results: $OUT/results.jsonl (a record a line), report.md, log.txt.gz, loss.jsonl, cells.tar.gz.
# QUICK=1 runs tiny models, with no limit but SECONDS. It ends with 1 if a stage failed.
set -u
BEGAN=$(date +%s)
TOTAL=${1:-540}; shift || true
STAGES=" ${*:-install probe smoke speed rates train peer resume exact} "
# Seconds, guessed until the first run on a GPU.
declare -A LIMITS=([probe]=60 [smoke]=90 [speed]=150 [train]=105 [resume]=120 [exact]=100 [peer]=60
    [rates]=60 [tests]=150 [fusedlamb]=40)
SECONDS_TO_STOP=40  # of a training: the last evaluation, and the end of the process
KIT=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-/tmp/kit-out}; WORK=${KIT_WORK:-/tmp/kit}; mkdir -p "$OUT" "$WORK"
PY=${PY:-python3}
SITE=${SITE:-/tmp/site}
LOG=$OUT/log.txt; RESULTS=$OUT/results.jsonl; : > "$LOG"; : > "$RESULTS"
QUICK=${QUICK:-}

elapsed() { echo $(( $(date +%s) - BEGAN )); }
say() { echo "== $(elapsed) s: $*" | tee -a "$LOG"; }
wants() { [[ $STAGES = *" $1 "* ]]; }
note() {  # NAME OK TEXT
    printf '{"kind": "stage", "name": "%s", "ok": %s, "at_total": %s, "says": %s}\n' \
        "$1" "$2" "$(elapsed)" "$(printf '%s' "$3" | "$PY" -c \
        'import json, sys; print(json.dumps(sys.stdin.read()[-1500:]))')" >> "$RESULTS"
}
# stage NAME COMMAND...: run it if it is wanted, within its limit and not past the end of all.
# It finds its seconds in KIT_SECONDS.
stage() {
    local name=$1 left=$(( TOTAL - 6 - $(elapsed) )) code; shift
    wants "$name" || return 0
    local limit=${LIMITS[$name]}
    if [ -n "$QUICK" ] || [ "$left" -lt "$limit" ]; then limit=$left; fi
    if [ "$limit" -lt 8 ]; then
        say "$name left out: no time"; note "$name" null "left out: no time"; return
    fi
    say "$name (at most $limit s)"
    KIT_STAGE=$name KIT_SECONDS=$limit timeout -k 5 "$limit" "$@" > "$WORK/$name.log" 2>&1
    code=$?
    [ $code -ge 124 ] && sweep "$name"
    { echo "--- $name: code $code"; tail -c 60000 "$WORK/$name.log"; } >> "$LOG"
    note "$name" "$([ $code = 0 ] && echo true || echo false)" \
        "code $code: $(grep -v '^$' "$WORK/$name.log" | tail -5 | cut -c1-500)"
    say "$name: code $code"
}
# A stage that ran out of time may leave processes in groups of their own, which hold the GPU.
sweep() {
    local environ
    for environ in /proc/[0-9]*/environ; do
        { tr '\0' '\n' < "$environ"; } 2> /dev/null | grep -qx "KIT_STAGE=$1" || continue
        kill -9 "$(basename "$(dirname "$environ")")" 2> /dev/null
    done
}

# The project: the checkout that travelled, or the packed one.
ROOT=$PWD
if [ ! -d albert_ds ]; then
    ROOT=$WORK/project; mkdir -p "$ROOT"; tar xzf "$KIT/project.tar.gz" -C "$ROOT"
fi
cd "$ROOT" || exit 2
if wants install && compgen -G "$KIT/*.whl" > /dev/null; then
    say "install"
    "$PY" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$SITE" "$KIT"/*.whl >> "$LOG" 2>&1 || note install false "see log"
    "$PY" -m compileall -q -j 0 "$SITE/deepspeed" "$SITE/megatron" > /dev/null 2>&1 &
fi
# Nothing is installed from this checkout: the path alone leads to it.
export PYTHONPATH=$ROOT:$ROOT/tools:$SITE${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=$WORK/inductor TRITON_CACHE_DIR=$WORK/triton
export TORCH_EXTENSIONS_DIR=$WORK/extensions
export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo
# Batches of real text differ in size: without it a third of the memory is lost.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# A micro-batch of a loader's worker holds several descriptors; the usual soft limit is 1,024.
ulimit -n "$(ulimit -Hn)"
# The headers that torch's own need and a bare toolkit lacks (cusparse.h) are in NVIDIA's wheels.
HEADERS=$("$PY" -c 'import nvidia; print(*nvidia.__path__, sep="\n")' 2> /dev/null |
    while read -r folder; do ls -d "$folder"/cu1*/include 2> /dev/null; done | head -1)
[ -n "$HEADERS" ] && export CPATH=$HEADERS${CPATH:+:$CPATH}
[ -d /usr/local/cuda ] && export CUDA_HOME=/usr/local/cuda PATH=/usr/local/cuda/bin:$PATH
DATA=$WORK/data
if [ ! -d "$DATA" ]; then mkdir "$DATA" && tar xJf "$KIT/data.tar.xz" -C "$DATA"; fi

# nvcc works on the CPU's cores, while the GPU measures.
BUILD='import time
from deepspeed.ops.op_builder.fused_lamb import FusedLambBuilder
started = time.time()
FusedLambBuilder().load(verbose=False)
print("built in", round(time.time() - started), "s")'
# DeepSpeed cannot read "9.0a", which the machine's own list may hold.
export TORCH_CUDA_ARCH_LIST=9.0
if wants fusedlamb; then
    MAX_JOBS=3 nice timeout 300 "$PY" -c "$BUILD" \
        > "$WORK/build.log" 2>&1 &
    BUILDER=$!
fi

day() { stage "$1" "$PY" "$KIT/gpu_day.py" "$1" --out "$RESULTS" ${QUICK:+--quick}; }
stage probe "$PY" "$KIT/probe.py"; cat "$WORK/probe.log" 2> /dev/null
day smoke
day speed
day rates

# 512 x 512 tokens a step: 160 steps are 42M tokens. It stops by itself at its limit (code 75).
TRAINING="--model albert-base --sequence-length 512 --batch-size 512 --micro-batch-size 64
    --num-workers 4 --steps 160 --warmup-steps 30 --log-every 5 --eval-every 40 --eval-samples 512"
PEER="--model albert-large --micro-batch-size 32 --sequence-length 512 --warmup 2 --rounds 5"
if [ -n "$QUICK" ]; then
    TRAINING="--model albert-tiny --num-layers 2 --sequence-length 64 --batch-size 16
        --micro-batch-size 8 --num-workers 2 --steps 12 --warmup-steps 2 --log-every 1
        --eval-every 6 --eval-samples 32"
    PEER="--model albert-tiny --micro-batch-size 2 --sequence-length 64 --warmup 1 --rounds 2"
fi
HOURS=$(awk "BEGIN {print (${LIMITS[train]} - $SECONDS_TO_STOP) / 3600}")
# shellcheck disable=SC2086
stage train bash -c '"$@"; code=$?; [ $code = 75 ] || exit $code' - \
    "$PY" -m albert_ds train $TRAINING --data "$DATA" --output "$WORK/run" \
    --learning-rate 0.00176 --deepspeed_config ds_configs/zero1_bf16.json --save-every 100000 \
    --max-hours "$([ -n "$QUICK" ] && echo 1 || echo "$HOURS")"
cp "$WORK/run/metrics.jsonl" "$OUT/loss.jsonl" 2> /dev/null

# shellcheck disable=SC2086
stage peer "$PY" tools/lab/peer_bench.py $PEER --peers sdpa eager --output "$WORK/peer.json" \
    --deepspeed_config ds_configs/zero1_bf16_adamw.json
# These are right or wrong at any speed, so they share the GPU.
stage resume "$PY" -m tools.lab.fault_check resume --data "$DATA" --folder "$WORK/resume" \
    --steps 30 ${QUICK:+--quick} --output "$WORK/resume.json" & SHARING=($!)
stage exact "$PY" "$KIT/exact.py" "$WORK" "$RESULTS" & SHARING+=($!)
# Every test starts processes that import for seconds: several at once.
stage tests "$PY" -m pytest -q -rs -p no:cacheprovider -p no:benchmark -n 6 -o addopts= \
    tests/gpu tests/model/test_kernels.py & SHARING+=($!)
wait "${SHARING[@]}"
if wants fusedlamb; then
    while kill -0 "$BUILDER" 2> /dev/null && [ "$(elapsed)" -lt $(( TOTAL - 50 )) ]; do
        sleep 1
    done
    note fusedlamb_build null "$(tail -2 "$WORK/build.log")"
    sed 's/"type": "Lamb"/"type": "FusedLamb"/' ds_configs/zero0_fp32.json > "$WORK/fused.json"
    stage fusedlamb "$PY" tools/throughput_bench.py --models albert-tiny --micro-batch 4 \
        --rounds 2 --ranks 1 --steps 2 --sequence-length 64 \
        --deepspeed_config "$WORK/fused.json" --output "$WORK/fused_bench.json"
fi

"$PY" "$KIT/report.py" "$RESULTS" > "$OUT/report.md" 2>> "$LOG"; cat "$OUT/report.md"
(cd "$WORK" && tar czf "$OUT/cells.tar.gz" ./*.log ./*.json)
say "end"
gzip -f -9 "$LOG"
! grep -q '^{"kind": "stage", .*"ok": false' "$RESULTS"
