#!/usr/bin/env bash
# A pretrained checkpoint against random weights of the same shape, on seven tasks, three seeds each,
# in sizes that two CPU cores can take: docs/finetuning.md was made with it.
#
#   bash tools/demo/finetune_demo.sh FILES CHECKPOINT OUTPUT
#
# FILES has glue/{CoLA,SST-2,MRPC,RTE,STS-B}, RACE/{train,dev}/middle and squad/ as published; its
# squad/train-v1.1.json and squad/dev-v1.1.json are taken as they are named.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
files=$(realpath "$1") checkpoint=$(realpath "$2") output=$3
python=${PYTHON:-.venv/bin/python}
mkdir -p "$output/data"
output=$(realpath "$output")

# The dev sets of SQuAD and RACE, and RACE's training set, are cut to whole articles and passages, so
# that judging does not take longer than training. No test sets: their labels are not public.
if [ ! -e "$output/data/race" ]; then
    for task in CoLA SST-2 MRPC RTE STS-B; do
        mkdir -p "$output/data/$task"
        ln -sf "$files/glue/$task/train.tsv" "$files/glue/$task/dev.tsv" "$output/data/$task"
    done
    mkdir -p "$output/data/squad1"
    "$python" - "$files/squad" "$output/data/squad1" <<'PY'
import json, pathlib, sys
source, target = map(pathlib.Path, sys.argv[1:])
for split, articles in (("train", None), ("dev", 2)):
    content = json.loads((source / f"{split}-v1.1.json").read_text())
    content["data"] = content["data"][:articles]
    (target / f"{split}-v1.1.json").write_text(json.dumps(content))
PY
    for split in train:600 dev:60; do
        mkdir -p "$output/data/race.tmp/${split%:*}/middle"
        find "$files/RACE/${split%:*}/middle" -name '*.txt' | sort | sed -n "1,${split#*:}p" |
            xargs ln -s -t "$output/data/race.tmp/${split%:*}/middle"
    done
    mv "$output/data/race.tmp" "$output/data/race"
fi

tune() { # task folder steps batch FLAG...
    for start in pretrained random; do
        "$python" -W ignore albert_ds/finetune.py --task "$1" --data "$output/data/$2" \
            --checkpoint "$checkpoint" --output "$output/$start/${1#*/}" --cache "$output/features" \
            --steps "$3" --batch-size "$4" --eval-every $((($3 + 2) / 3)) --save-every "$3" \
            --learning-rate "${RATE:-5e-4}" --dropout 0 --seeds 3 --log-every "$3" "${@:5}" \
            $([ $start = random ] && echo --from-scratch)
    done
}
tune glue/cola CoLA 240 32
tune glue/sst2 SST-2 240 32
tune glue/mrpc MRPC 120 16
tune glue/rte RTE 120 16
tune glue/stsb STS-B 240 16
tune squad1 squad1 100 8 --sequence-length 192
tune race race 80 4 --sequence-length 128 --question-length 40
"$python" tools/lab/paper_table.py --spread --rows "pretrained=$output/pretrained" \
    "random=$output/random" --output "$output/table.json" \
    --tasks glue/cola glue/sst2 glue/mrpc glue/rte glue/stsb squad1 race
