#!/usr/bin/env bash
# The GPU machine's one command:  bash .whl/run.sh [SECONDS] [install] [PIECE ...]
# It installs the wheels, sets the environment and runs `albert-ds gpu-check`, whose pieces these are;
# the word `minutes` alone, beside `install`, runs minutes.sh on all .whl/minutes-*.tar.xz of this call
# and of those before it.
# Results: $OUT/results.jsonl (a record a line), report.md, log.txt.gz, loss.jsonl, cells.tar.gz.
# QUICK=1 runs tiny models. It ends with 1 if a piece failed.
set -u
TOTAL=${1:-540}; shift || true
ASKED=" ${*:-install machine smoke speed rates train peer resume exactness} "
PIECES=${ASKED/ install / }
SECONDS_TO_PACK=12  # the results
KIT=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-/tmp/kit-out}; WORK=${KIT_WORK:-/tmp/kit}; mkdir -p "$OUT" "$WORK"
PY=${PY:-python3}
SITE=${SITE:-/tmp/site}

# The project: the checkout that travelled, or the packed one.
ROOT=$PWD
if [ ! -d albert_ds ]; then
    ROOT=$WORK/project; mkdir -p "$ROOT"; tar xzf "$KIT/project.tar.gz" -C "$ROOT"
fi
cd "$ROOT" || exit 2
if [[ $ASKED = *" install "* ]] && compgen -G "$KIT/*.whl" > /dev/null; then
    "$PY" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$SITE" "$KIT"/*.whl || exit 2
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
# DeepSpeed cannot read "9.0a", which the machine's own list may hold.
export TORCH_CUDA_ARCH_LIST=9.0
DATA=$WORK/data
if [ ! -d "$DATA" ] && [ -f "$KIT/data.tar.xz" ]; then
    mkdir "$DATA" && tar xJf "$KIT/data.tar.xz" -C "$DATA"
fi
parts=()
for part in "$KIT"/minutes-*.tar.xz; do
    folder=$WORK/$(basename "$part" .tar.xz)
    [ -f "$part" ] && [ ! -d "$folder" ] || continue
    mkdir -p "$folder.part" && tar xJf "$part" -C "$folder.part" && mv "$folder.part" "$folder" &
    parts+=($!)
done
[ ${#parts[@]} = 0 ] || wait "${parts[@]}"

[ -n "${PIECES// }" ] || exit 0
if [[ $PIECES =~ ^\ *minutes\ *$ ]]; then
    DATA=$(ls -d "$WORK"/minutes-data-* 2> /dev/null | tr '\n' ' ')
    PAIRS=$(ls -d "$WORK"/minutes-scores/blimp/data 2> /dev/null)
    TASKS=$(ls -d "$WORK"/minutes-scores/glue 2> /dev/null)
    MINUTES=$(awk "BEGIN {print $((TOTAL - SECONDS)) / 60}") WORK=$WORK/trained
    export PY OUT DATA PAIRS TASKS MINUTES WORK
    exec bash tools/gpu_kit/minutes.sh
fi
REPORT=$(mktemp -d "$WORK/report-XXXXXX")  # of its own: a second call measures anew
MINUTES=$(awk "BEGIN {print ($TOTAL - $SECONDS_TO_PACK - $SECONDS) / 60}")
pack() {
    cp "$REPORT"/report.md "$REPORT"/*.jsonl "$OUT"
    # Its own file: when the loop below is killed, its tar may still write.
    tar czf "$REPORT/$BASHPID.tar.gz" -C "$REPORT" cells &&
        mv "$REPORT/$BASHPID.tar.gz" "$OUT/cells.tar.gz"
}
# If this is cut off, what was known by then is there.
while sleep 10 && [ -d /proc/$$ ]; do pack; done > /dev/null 2>&1 &
# shellcheck disable=SC2086
"$PY" -m albert_ds gpu-check --output "$REPORT" --data "$DATA" \
    --minutes "$MINUTES" --piece $PIECES ${QUICK:+--quick} 2>&1 | tee "$OUT/log.txt"
CODE=${PIPESTATUS[0]}
kill $!; wait $! 2> /dev/null
pack; cat "$OUT/report.md"
gzip -f -9 "$OUT/log.txt"
exit "$CODE"
