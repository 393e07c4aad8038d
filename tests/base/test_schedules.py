"""Schedules: equal to a plain reference, step by step. What is none: test_depth.py."""

import pytest

from albert_ds.base.cli import Range
from albert_ds.base.schedules import cut, read_schedule

STEPS = 40
COUNT = Range(ge=1, is_integer=True)
# Text, and the steps at which the value is known, joined as its commas and dots say.
CASES = {
    "8": lambda step: 8,
    "8@0,16@35%": lambda step: 8 if step < 14 else 16,
    "8,16@7,4@20": lambda step: 8 if step < 7 else 16 if step < 20 else 4,
    "8@0,16@2.5%": lambda step: 8 if step < 1 else 16,
    "10..50@100%": lambda step: 10 + step,
    "10@0,10@10..40@50%,5@30": lambda step: (
        10 if step < 10 else 10 + 3 * (step - 10) if step < 20 else 40 if step < 30 else 5
    ),
}


@pytest.mark.parametrize("text", CASES)
def test_every_step_has_the_value_of_the_reference(text):
    schedule = read_schedule("--x", text, STEPS, COUNT, lines=True)
    assert [schedule.at(step) for step in range(STEPS + 5)] == [
        CASES[text](min(step, STEPS)) for step in range(STEPS + 5)
    ]
    if ".." not in text:
        for step in range(STEPS + 1):
            total = sum(schedule.at(begin) * steps for begin, steps in cut([schedule], step))
            assert total == sum(map(CASES[text], range(step)))
