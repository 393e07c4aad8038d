#!/usr/bin/env bash
# The whole road in a few minutes on two CPU cores, from text that every Python installation
# carries: vocabulary -> shards -> pretraining on 2 ranks -> held-out accuracy -> Hugging Face folder
# -> three filled masks. Everything lands in demo/; `make demo` runs this.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
rm -rf demo
mkdir demo

echo "== 1. text: the interpreter's reference and the docstrings of installed packages"
python tools/demo/demo_corpus.py --output demo/text.txt --max-bytes 4000000
echo "== 2. vocabulary: SentencePiece in ALBERT's layout"
python tools/build_vocab.py --input demo/text.txt --output demo/vocab --vocab-size 4000 \
    --strip-accents
echo "== 3. shards: every sequence once, as token ids"
python tools/build_shards.py --input demo/text.txt --vocab demo/vocab/spiece.model \
    --output demo/data --sequence-length 64 --holdout 0.05
# The recipe of `albert-ds learn` (docs/learning.md), narrower, at 0.004 and growing to four layers.
# Muon, since so small a batch is not what LAMB is for: its ratio scales a matrix's update by the
# matrix's own norm, so the rate at which 0.02-sized weights would learn is far too high for the
# biases, which it leaves unscaled.
echo "== 4. pretraining: a very small ALBERT, 2 ranks, ZeRO-1, Muon"
FLAGS=(--config recipes/small.yaml --embedding-size 64 --hidden-size 64 --num-layers 4
    --depth-schedule 2@0,4@60% --sequence-length 64 --data demo/data --steps 3000
    --micro-batch-size 16 --learning-rate 0.004 --warmup-steps 250
    --deepspeed_config ds_configs/zero1_fp32_muon.json)
python -m albert_lab.neighbours "${FLAGS[@]}" --output demo/start
deepspeed -q --num_gpus 2 albert_ds/train.py "${FLAGS[@]}" --init-from demo/start \
    --output demo/run --log-every 250 --eval-every 750 2> demo/train.log ||
    { tail -n 20 demo/train.log; exit 1; }
echo "== 5. held-out accuracy"
python tools/probe.py --checkpoint demo/run --data demo/data --output demo/probe.json \
    2> demo/probe.log || { tail -n 20 demo/probe.log; exit 1; }
echo "== 6. Hugging Face folder: demo/hf"
python tools/convert_hf.py export --checkpoint demo/run --output demo/hf
echo "== 7. three filled masks"
python tools/fill_mask.py --checkpoint demo/hf \
    "Return the [MASK] of the array." \
    "If the argument is [MASK], an error is raised." \
    "The first [MASK] is a list of strings."
echo "== 8. what this was: demo/report.html, and in short"
python tools/report.py demo/run --output demo/report.html
python tools/demo/demo_verdict.py demo/probe.json
