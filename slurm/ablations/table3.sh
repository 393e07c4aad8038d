#!/bin/bash
# Table 3: the embedding size, of ALBERT-base with nothing and with everything shared.
. "$(dirname "$0")/common.sh"
for sharing in none all; do
    for width in 64 128 256 768; do
        embedding=$(at $width $((width > 256 ? 128 : width / 4)))
        # shellcheck disable=SC2046 (words on purpose)
        row $sharing-$embedding $(size albert-base) --sharing $sharing --embedding-size $embedding
    done
done
table
