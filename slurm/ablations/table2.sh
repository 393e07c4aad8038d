#!/bin/bash
# Table 2: BERT and ALBERT of every size, 125k steps each.
. "$(dirname "$0")/common.sh"
for name in bert-base bert-large albert-base albert-large albert-xlarge albert-xxlarge; do
    # shellcheck disable=SC2046 (words on purpose)
    row $name $(size $name)
done
# shellcheck disable=SC2046 (words on purpose)
table $(ended bert-large && echo --speedup-over bert-large)
