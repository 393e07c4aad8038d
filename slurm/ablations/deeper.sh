#!/bin/bash
# Is a very wide model better deeper (appendix): ALBERT-xxlarge with 12 and with 24 layers.
. "$(dirname "$0")/common.sh"
for layers in 12 24; do
    # shellcheck disable=SC2046 (words on purpose)
    row layers-$layers $(size albert-xxlarge) --num-layers $layers
done
table
