#!/bin/bash
# Table 5: the sentence task, none, NSP or SOP, on the intrinsic tasks and downstream.
. "$(dirname "$0")/common.sh"
for objective in none nsp sop; do
    # shellcheck disable=SC2046 (words on purpose)
    row $objective $(size albert-base) --objective $objective
    probe $objective
done
table
