#!/bin/bash
# Width (appendix): a 3-layer ALBERT of hidden size 1024 to 6144, H / 64 heads.
. "$(dirname "$0")/common.sh"
for width in 1024 2048 4096 6144; do
    hidden=$(at $width $((width / 16)))
    # shellcheck disable=SC2046 (words on purpose)
    row hidden-$hidden $(size albert-large) --num-layers 3 --hidden-size $hidden \
        --num-heads "$(at $((width / 64)) $((width / 512)))"
done
table
