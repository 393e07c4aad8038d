#!/bin/bash
# Depth (appendix): ALBERT-large with 1 to 48 layers, each started from the shallower one.
. "$(dirname "$0")/common.sh"
before=
for layers in 1 3 6 12 24 48; do
    # shellcheck disable=SC2046 (words on purpose)
    row layers-$layers $(size albert-large) --num-layers $layers \
        ${before:+--init-from "$OUT/layers-$before/run"}
    before=$layers
done
table
