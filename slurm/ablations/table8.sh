#!/bin/bash
# Table 8 and Figure 2: dropout or none, of ALBERT-xxlarge; with the held-out MLM curves.
. "$(dirname "$0")/common.sh"
# shellcheck disable=SC2046 (words on purpose)
row with-dropout $(size albert-xxlarge) --dropout 0.1
# shellcheck disable=SC2046 (words on purpose)
row without-dropout $(size albert-xxlarge) --dropout 0
if [ -f "$OUT/with-dropout/run/metrics.jsonl" ] && [ -f "$OUT/without-dropout/run/metrics.jsonl" ]; then
    "$PYTHON" tools/plots.py --runs "$OUT/with-dropout/run" "$OUT/without-dropout/run" \
        --labels dropout none --output "$OUT/figure2.png"
fi
table
