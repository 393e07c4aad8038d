#!/bin/bash
# Table 7: additional data. EXTRA is a second folder of shards, of the same vocabulary.
. "$(dirname "$0")/common.sh"
[ -n "${EXTRA:-}" ] || stop "EXTRA is not set: the folder of additional shards"
# shellcheck disable=SC2046 (words on purpose)
row without $(size albert-base)
# shellcheck disable=SC2046 (words on purpose)
row with $(size albert-base) --data "$DATA" "$EXTRA"
table
