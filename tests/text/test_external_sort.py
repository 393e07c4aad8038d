"""What is read back from sorted runs is what a sort of everything in memory would give."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from albert_ds.text import external_sort
from albert_ds.text.external_sort import KEYS, RunWriter, Spilled, read_range

KEY = st.integers(0, 40).map(lambda n: n * (KEYS // 41))  # few, so that some are equal
SPILLED = st.builds(
    Spilled,
    key=KEY,
    record=st.binary(min_size=1, max_size=30),
    tokens=st.integers(0, 1 << 20),
    draw=KEY,
    opens_document=st.booleans(),
)


@given(
    units=st.lists(st.lists(SPILLED, max_size=30), max_size=4),
    low=KEY,
    high=st.one_of(KEY, st.just(KEYS)),
    threshold=KEY,
    run_bytes=st.integers(1, 400),
)
def test_ranges_of_runs_are_ranges_of_the_sorted_whole(
    units, low, high, threshold, run_bytes, tmp_path_factory
):
    folder, paths = tmp_path_factory.mktemp("runs"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(external_sort, "RUN_BYTES", run_bytes)
        for number, unit in enumerate(units):
            writer = RunWriter(folder / f"unit-{number}")
            for spilled in unit:
                writer.add(spilled)
            writer.flush()
            paths += writer.files
    whole = sorted(spilled for unit in units for spilled in unit if low <= spilled.key < high)
    held_out = read_range(paths, low, high, lowest_draw=0, end_of_draws=threshold)
    train = read_range(paths, low, high, lowest_draw=threshold, end_of_draws=KEYS)
    assert held_out == [spilled for spilled in whole if spilled.draw < threshold]
    assert train == [spilled for spilled in whole if spilled.draw >= threshold]
