#!/bin/bash
# Table 6: about the same training time, 34 and 32 hours in the paper. On other hardware other steps
# take that long: STEPS_BERT and STEPS_ALBERT are hours x 3600 x sequences per second (slurm/bench.sh)
# / 4096. The learning rate ends with a row's own steps; a time limit would cut it off at its height.
. "$(dirname "$0")/common.sh"
# shellcheck disable=SC2046 (words on purpose)
row bert-large $(size bert-large) --steps "${STEPS_BERT:-$(at 400000 "${STEPS:-40}")}"
# shellcheck disable=SC2046 (words on purpose)
row albert-xxlarge $(size albert-xxlarge) --steps "${STEPS_ALBERT:-$(at 125000 "${STEPS:-40}")}"
table --time
