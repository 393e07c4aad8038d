#!/bin/bash
# Table 6: about the same training time: BERT-large's 400k steps against ALBERT-xxlarge's 125k.
. "$(dirname "$0")/common.sh"
HOURS=${HOURS:-$(at 34 0.01)}
for name in bert-large albert-xxlarge; do
    # shellcheck disable=SC2046 (words on purpose)
    row $name $(size $name) --steps "$(at 400000 100000)" --max-hours "$HOURS"
done
table --time
