#!/bin/bash
# Table 4: what layers share, of ALBERT-base with E = H and with E = 128.
. "$(dirname "$0")/common.sh"
for width in 768 128; do
    embedding=$(at $width $((width == 768 ? 128 : 32)))
    for sharing in all attention ffn none; do
        # shellcheck disable=SC2046 (words on purpose)
        row $sharing-$embedding $(size albert-base) --sharing $sharing --embedding-size $embedding
    done
done
table
