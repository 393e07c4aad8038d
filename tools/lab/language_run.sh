#!/usr/bin/env bash
# One language end to end in about ten minutes on two CPU cores: text -> vocabulary -> shards -> STEPS steps
# (1500) on 2 ranks -> held-out accuracy -> Hugging Face folder -> the same ids there -> filled masks.
#
#   bash tools/lab/language_run.sh LANGUAGE TEXT OUTPUT "A sentence with a [MASK]." ...
#
# OUTPUT is a folder; this script makes it and refuses one that exists.
set -euo pipefail
if (($# < 4)); then
    sed -n 5p "$0" >&2
    exit 2
fi
language=$1 text=$(realpath "$2") output=$(realpath -m "$3")
shift 3
cd "$(dirname "$0")/../.."
steps=${STEPS:-1500}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$PWD
mkdir "$output"

# Runs a command whose stderr goes to OUTPUT/NAME.log, which is shown if it fails.
logged() {
    local log=$output/$1.log
    shift
    "$@" 2> "$log" || {
        tail -n 20 "$log"
        exit 1
    }
}

echo "== 1. vocabulary of 8,000 pieces"
logged vocab python tools/build_vocab.py --input "$text" --language "$language" \
    --output "$output/vocab" --vocab-size 8000
echo "== 2. shards of 128 tokens"
logged shards python tools/build_shards.py --input "$text" --language "$language" \
    --vocab "$output/vocab/spiece.model" --output "$output/data" --sequence-length 128 --holdout 0.05
echo "== 3. pretraining: albert-tiny with 3 layers, $steps steps, 2 ranks, ZeRO-1, AdamW"
logged train deepspeed --num_gpus 2 --master_port "${MASTER_PORT:-29500}" albert_ds/train.py --model albert-tiny --data "$output/data" \
    --output "$output/run" --steps "$steps" --batch-size 64 --micro-batch-size 32 \
    --num-layers 3 --learning-rate 0.0015 --warmup-steps 100 --sequence-length 64 --max-ngram 1 \
    --dropout 0 --deepspeed_config ds_configs/zero1_fp32_adamw.json --log-every 50 --eval-every 300
echo "== 4. held-out accuracy"
logged probe python tools/probe.py --checkpoint "$output/run" --data "$output/data"
echo "== 5. Hugging Face folder: $output/hf"
python tools/convert_hf.py export --checkpoint "$output/run" --output "$output/hf"
echo "== 6. AutoTokenizer: loaded, saved, loaded again"
python - "$text" "$output" << 'END'
import sys
from pathlib import Path

from transformers import AutoTokenizer

from albert_ds.data.vocab import read_vocab

text, output = map(Path, sys.argv[1:])
lines = [line for line in text.read_text(encoding="utf-8").splitlines() if line.strip()]
lines = lines[:: max(1, len(lines) // 2000)][:2000]
ids = read_vocab(output / "run" / "spiece.model").encode(lines)
first = AutoTokenizer.from_pretrained(output / "hf")
first.save_pretrained(output / "saved")
for name, tokenizer in (
    ("loaded", first),
    ("saved and loaded again", AutoTokenizer.from_pretrained(output / "saved")),
):
    theirs = tokenizer(lines, add_special_tokens=False)["input_ids"]
    equal = sum(a == b for a, b in zip(ids, theirs, strict=True))
    print(f"{name}: ids equal on {equal:,} of {len(lines):,} lines")
    if equal < len(lines):
        sys.exit(1)
END
echo "== 7. filled masks"
python tools/fill_mask.py --checkpoint "$output/hf" "$@"
