#!/bin/bash
# Measure anew what docs/notebook/benchmarks.md, performance.md, lamb.md and scaling.md state: every report of
# a benchmark in docs/raw, by one command. Reports go to OUT, because a report in docs/raw would be a
# change of the tree, which they record; a tree with changes is refused. Reports that exist are kept,
# so the same command continues. Root and a quiet machine; two hours on two cores.
#
#   DATA=wikipedia SHORT=short bash tools/lab/results.sh && cp build/results/*.json docs/raw/
#   ONLY='bench_large lamb_bench' bash tools/lab/results.sh
#
# DATA   shards of 512 tokens (docs/data.md), for peer_wikipedia and peer_wikipedia_bf16
# SHORT  shards of short documents, for peer_short
# OUT    folder of the reports (default: build/results)
# ONLY   names of the reports to make (default: all)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-.venv/bin/python} OUT=${OUT:-build/results} ONLY=${ONLY:-}
export PYTHONPATH=$PWD # of an editable install the scripts of tools/ would read another checkout
ALL=()

stop() {
    echo "results: $*" >&2
    exit 2
}
[ -z "$(git status --porcelain --untracked-files=no)" ] || stop "the tree has changes: commit them"
mkdir -p "$OUT"

# report NAME COMMAND...: run the command with --output OUT/NAME.json; its text goes to NAME.txt.
report() {
    local name=$1
    shift
    ALL+=("$name")
    [ -z "$ONLY" ] || [[ " $ONLY " == *" $name "* ]] || return 0
    [ ! -f "$OUT/$name.json" ] || return 0
    echo "== $name: $*" >&2
    "$PYTHON" "$@" --output "$OUT/$name.json" | tee "$OUT/$name.txt"
}

bench() { # NAME MODELS FLAG...
    local name=$1 models=$2
    shift 2
    # shellcheck disable=SC2086 # models are words
    report "$name" -m albert_ds bench --models $models --ranks 2 --nodes 2 --sequence-length 64 \
        --micro-batch 1 --rounds 3 --deepspeed_config ds_configs/zero1_fp32.json "$@"
}

LARGE='bert-large albert-large' BASE='bert-base albert-base'
bench bench_large "$LARGE" --link none,1gbit
bench bench_large_512 "$LARGE" --link none,1gbit --sequence-length 512 --rounds 2
bench bench_large_100mbit "$LARGE" --link 100mbit --rounds 1
bench bench_base_2 "$BASE" --link none,1gbit,300mbit --micro-batch 1,2,4
bench bench_base_2_100mbit "$BASE" --link 100mbit --rounds 1
bench bench_base_4 "$BASE" --link none,1gbit --ranks 4 --nodes 4
bench bench_base_4_100mbit "$BASE" --link 100mbit --ranks 4 --nodes 4 --rounds 1 --warmup 0
bench bench_tried albert-large --link 1gbit --deepspeed_config ds_configs/zero1_fp32.json \
    ds_configs/zero0_fp32.json ds_configs/tried/*.json
bench bench_tensor_parallel albert-large --link 1gbit --ranks 4 --tensor-parallel 1,2 --rounds 2
report bench_tp_dp -m albert_ds bench --models albert-base --ranks 2 --tensor-parallel 1,2 \
    --micro-batch 2 --sequence-length 512 --rounds 3 --deepspeed_config ds_configs/zero1_fp32.json

peer() { # NAME FLAG...
    local name=$1
    shift
    report "$name" tools/lab/peer_bench.py "$@"
}
BF16=ds_configs/zero1_bf16_adamw.json
peer peer_full --compile --profile --rounds 5
peer peer_no_dropout --compile --profile --rounds 3 --dropout 0
peer peer_bf16 --compile --profile --rounds 5 --deepspeed_config $BF16
peer peer_bf16_no_dropout --compile --profile --rounds 3 --dropout 0 --deepspeed_config $BF16
peer peer_wikipedia --rounds 6 --padding row --data "${DATA:-DATA}"
peer peer_wikipedia_bf16 --compile --rounds 6 --padding row --data "${DATA:-DATA}" --deepspeed_config $BF16
peer peer_short --rounds 3 --padding row --data "${SHORT:-SHORT}"
report lamb_bench tools/lab/lamb_bench.py --models albert-base albert-large

for name in $ONLY; do
    [[ " ${ALL[*]} " == *" $name "* ]] || stop "ONLY: $name is none of ${ALL[*]}"
done
