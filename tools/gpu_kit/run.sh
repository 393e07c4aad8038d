#!/usr/bin/env bash
# The GPU machine's one command:  bash .whl/run.sh [SECONDS] [STAGE ...]
# Stages run in the order of their worth, each with its own limit; one that fails stops nothing.
# Results: $OUT/results.jsonl (a record a line), report.md, log.txt, loss.jsonl, cells.tar.gz.
# QUICK=1 does all with tiny models (this is how it is tested without a GPU).
set -u
BEGAN=$(date +%s.%N)
TOTAL=${1:-540}; shift || true
ALL="install probe smoke speed train resume exact peer rates"
STAGES=${*:-$ALL}
KIT=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-/tmp/kit-out}; mkdir -p "$OUT"
WORK=${KIT_WORK:-/tmp/kit}; mkdir -p "$WORK"
PY=${PY:-python3}
SITE=${SITE:-/tmp/site}
LOG=$OUT/log.txt; RES=$OUT/results.jsonl; : >> "$LOG"; : >> "$RES"
QUICK=${QUICK:-}; Q=${QUICK:+--quick}

now() { echo "$(date +%s.%N) $BEGAN" | awk '{printf "%.0f", $1 - $2}'; }
left() { echo $(( TOTAL - $(now) )); }
say() { echo "== $(now) s: $*" | tee -a "$LOG"; }
note() { printf '{"kind": "stage", "name": "%s", "ok": %s, "at_total": %s, "says": %s}\n' "$1" "$2" "$(now)" \
    "$(printf '%s' "$3" | "$PY" -c 'import json,sys; print(json.dumps(sys.stdin.read()[-1500:]))')" >> "$RES"; }
# stage NAME LIMIT COMMAND...: run it for at most LIMIT s, and not past the end of all
stage() {
    local name=$1 limit=$2 rest; shift 2
    rest=$(( $(left) - 6 )); [ "$rest" -lt "$limit" ] && limit=$rest
    if [ "$limit" -lt 8 ]; then say "$name left out: no time"; note "$name" null "left out: no time"; return 1; fi
    say "$name (at most $limit s)"
    KIT_STAGE=$name timeout -k 5 "$limit" "$@" > "$WORK/$name.log" 2>&1; local code=$?
    [ $code -ge 124 ] && sweep "$name"
    { echo "--- $name: code $code"; tail -c 60000 "$WORK/$name.log"; } >> "$LOG"
    note "$name" "$([ $code = 0 ] && echo true || echo false)" "code $code: $(grep -v '^$' "$WORK/$name.log" | tail -3 | cut -c1-500)"
    say "$name: code $code"
    return $code
}
# A stage that ran out of time may have left processes in groups of their own, which would hold the GPU.
sweep() {
    local e p
    for e in /proc/[0-9]*/environ; do
        p=${e%/environ}; p=${p#/proc/}
        tr '\0' '\n' < "$e" 2> /dev/null | grep -qx "KIT_STAGE=$1" && kill -9 "$p" 2> /dev/null
    done; true
}
wants() { [[ " $STAGES " = *" $1 "* ]]; }

# ---- the project: the checkout that travelled, else the packed one
if [ -d albert_ds ] && [ -f pyproject.toml ]; then ROOT=$PWD; else
    ROOT=$WORK/project; mkdir -p "$ROOT"; tar xzf "$KIT/project.tar.gz" -C "$ROOT"; fi
cd "$ROOT" || exit 2
if wants install && compgen -G "$KIT/*.whl" > /dev/null; then
    say "install"
    "$PY" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$KIT"/*.whl \
        >> "$LOG" 2>&1 || { note install false "pip failed"; tail -5 "$LOG"; }
    "$PY" -m compileall -q -j 0 "$SITE/deepspeed" "$SITE/megatron" albert_ds > /dev/null 2>&1 &
fi
# Nothing is installed from this checkout: the path alone leads to it.
export PYTHONPATH=$ROOT:$ROOT/tools:$SITE${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=$WORK/inductor TRITON_CACHE_DIR=$WORK/triton TORCH_EXTENSIONS_DIR=$WORK/extensions
export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo MASTER_ADDR=127.0.0.1
# A micro-batch from a loader's worker holds 7 file descriptors; the usual soft limit is 1,024.
ulimit -n "$(ulimit -Hn)" 2> /dev/null || ulimit -n 65536 2> /dev/null || true
# The headers that torch's own need and a bare toolkit lacks (cusparse.h) are in NVIDIA's wheels.
HEADERS=$("$PY" -c 'import importlib.util as u, pathlib as p
for r in (list(u.find_spec("nvidia").submodule_search_locations) if u.find_spec("nvidia") else []):
    for d in sorted(p.Path(r).glob("cu1*/include")): print(d)' 2> /dev/null | head -1)
[ -n "$HEADERS" ] && export CPATH=$HEADERS${CPATH:+:$CPATH}
[ -d /usr/local/cuda ] && export CUDA_HOME=/usr/local/cuda PATH=/usr/local/cuda/bin:$PATH
DATA=$WORK/data
if [ ! -d "$DATA" ] && [ -f "$KIT/data.tar.xz" ]; then mkdir -p "$DATA"; tar xJf "$KIT/data.tar.xz" -C "$DATA"; fi

if wants probe; then stage probe 60 bash -c '
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit,ecc.mode.current --format=csv,noheader
    uname -r; nproc; free -g | sed -n 2p; df -h /tmp /dev/shm | tail -2; echo "open files $(ulimit -n)"; ls /dev/nvidia* 2>&1 | tr "\n" " "
    '"$PY"' - <<"P"
import fcntl, socket, struct
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)  # NCCL and gloo need a network interface that is up
try:
    flags = struct.unpack("16sh", fcntl.ioctl(s, 0x8913, struct.pack("16sh", b"lo", 0))[:18])[1]
    print("lo is", "up" if flags & 1 else "DOWN")
    if not flags & 1: fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", flags | 1)); print("lo set up")
except OSError as e: print("lo:", e)
P
    nvcc --version | tail -2; ls ${CUDA_HOME:-/usr/local/cuda}/include/cusparse.h 2>&1; echo "CPATH=${CPATH:-}"
    '"$PY"' - <<"P"
import sys, time; t = time.time()
import torch; print("python", sys.version.split()[0], "torch", torch.__version__, "cuda", torch.version.cuda, "cudnn", torch.backends.cudnn.version(), round(time.time() - t, 1), "s")
from importlib.metadata import version
print({n: version(n) for n in ("deepspeed", "megatron-core", "transformers", "triton", "numpy", "sentencepiece", "pydantic", "webdataset")})
print(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0)); t = time.time()
import deepspeed; print("deepspeed", round(time.time() - t, 1), "s", deepspeed.accelerator.get_accelerator()._name)
P'; tail -25 "$WORK/probe.log"; fi
# nvcc works on the CPU's cores, while the GPU measures
if wants fusedlamb; then
    (TORCH_CUDA_ARCH_LIST=9.0 MAX_JOBS=3 nice -n 10 timeout 300 "$PY" -c '
import time; t = time.time()
from deepspeed.ops.op_builder.fused_lamb import FusedLambBuilder
FusedLambBuilder().load(verbose=False); print("built in", round(time.time() - t), "s")' > "$WORK/build.log" 2>&1) & BUILD=$!; fi

wants smoke && stage smoke "${SMOKE_SECONDS:-90}" "$PY" "$KIT/gpu_day.py" smoke --out "$RES" --seconds "$(( ${SMOKE_SECONDS:-90} - 10 ))" $Q
wants speed && stage speed "${SPEED_SECONDS:-180}" "$PY" "$KIT/gpu_day.py" speed --out "$RES" --seconds "$(( ${SPEED_SECONDS:-180} - 12 ))" $Q

if wants train; then
    # 512 x 512 tokens a step: 160 steps are 42M tokens. It stops by itself when its time is over (code 75).
    SECONDS_OF_TRAINING=${TRAIN_SECONDS:-65}
    FLAGS="--model albert-base --sequence-length 512 --batch-size 512 --micro-batch-size 64 --num-workers 4
        --steps 160 --warmup-steps 30 --log-every 5 --eval-every 40 --eval-samples 512"
    [ -n "$QUICK" ] && FLAGS="--model albert-tiny --num-layers 2 --sequence-length 64 --batch-size 16 --micro-batch-size 8 --num-workers 2
        --steps 12 --warmup-steps 2 --log-every 1 --eval-every 6 --eval-samples 32"
    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # batches of real text differ in size: without it a third is lost
    stage train $(( SECONDS_OF_TRAINING + 40 )) bash -c '"$@"; code=$?; [ $code = 75 ] && exit 0; exit $code' - \
        "$PY" -m albert_ds train $FLAGS --data "$DATA" --output "$WORK/run" --learning-rate 0.00176 \
        --deepspeed_config ds_configs/zero1_bf16.json --save-every 100000 \
        --max-hours "$(awk "BEGIN{print $SECONDS_OF_TRAINING / 3600}")"
    unset PYTORCH_CUDA_ALLOC_CONF
    cp "$WORK/run/metrics.jsonl" "$OUT/loss.jsonl" 2> /dev/null
    note train_exit null "$(cat "$WORK/run/exit.json" 2> /dev/null)"
fi
wants resume && stage resume "${RESUME_SECONDS:-75}" "$PY" -m tools.lab.fault_check resume --data "$DATA" --folder "$WORK/resume" --steps "${RESUME_STEPS:-30}" $Q --output "$WORK/resume.json"
wants exact && stage exact "${EXACT_SECONDS:-100}" "$PY" "$KIT/exact.py" "$WORK" "$RES"
if wants peer; then
    M=albert-large; B=32; R=5; S=512; [ -n "$QUICK" ] && { M=albert-tiny; B=2; R=2; S=64; }
    stage peer "${PEER_SECONDS:-60}" "$PY" tools/lab/peer_bench.py --model $M --micro-batch-size $B --sequence-length $S --warmup 2 --rounds $R \
        --deepspeed_config ds_configs/zero1_bf16_adamw.json --peers sdpa eager --output "$WORK/peer.json"
    note peer_table null "$(tail -6 "$WORK/peer.log")"
fi
wants rates && stage rates 60 "$PY" "$KIT/gpu_day.py" rates --out "$RES" --seconds 50 $Q
wants tests && stage tests 150 "$PY" -m pytest -m gpu -q -rs -p no:cacheprovider tests/gpu
if wants fusedlamb; then
    while kill -0 "${BUILD:-0}" 2> /dev/null && [ "$(left)" -gt 50 ]; do sleep 1; done
    cat "$WORK/build.log" >> "$LOG"; note fusedlamb_build null "$(tail -2 "$WORK/build.log")"
    sed 's/"type": "Lamb"/"type": "FusedLamb"/' ds_configs/zero0_fp32.json > "$WORK/fused.json"
    grep -q "built in" "$WORK/build.log" && stage fusedlamb 40 "$PY" tools/throughput_bench.py --models albert-tiny --micro-batch 4 \
        --rounds 2 --ranks 1 --steps 2 --sequence-length 64 --deepspeed_config "$WORK/fused.json" --output "$WORK/fused_bench.json"
fi
"$PY" "$KIT/report.py" "$RES" > "$OUT/report.md" 2>> "$LOG"; cat "$OUT/report.md"
tar czf "$OUT/cells.tar.gz" -C "$WORK" $(cd "$WORK" && ls ./*.log ./*.json 2> /dev/null) 2> /dev/null
gzip -f -9 < "$LOG" > "$OUT/log.txt.gz"; [ "$(stat -c %s "$LOG")" -gt 15000000 ] && rm "$LOG"
say "end"
