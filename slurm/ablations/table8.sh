#!/bin/bash
# Table 8 and Figure 2: dropout or none, of ALBERT-xxlarge; with the held-out MLM curves.
. "$(dirname "$0")/common.sh"
every=$(at 5000 $(((${STEPS:-40} + 7) / 8)))
# shellcheck disable=SC2046 (words on purpose)
row with-dropout $(size albert-xxlarge) --dropout 0.1 --eval-every "$every"
# shellcheck disable=SC2046 (words on purpose)
row without-dropout $(size albert-xxlarge) --dropout 0 --eval-every "$every"
if [ -f "$OUT/with-dropout/run/metrics.jsonl" ] && [ -f "$OUT/without-dropout/run/metrics.jsonl" ]; then
    "$PYTHON" tools/plots.py curves --runs "$OUT/with-dropout/run" "$OUT/without-dropout/run" \
        --labels dropout none --output "$OUT/figure2.svg"
fi
table
