"""What is read back from sorted runs is what a sort of everything in memory would give."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from albert_ds.text import external_sort
from albert_ds.text.external_sort import KEYS, RunWriter, SortRecord, read_range

KEY = st.integers(0, 40).map(lambda n: n * (KEYS // 41))  # few, so that some are equal
RECORD = st.builds(
    SortRecord,
    key=KEY,
    content=st.binary(min_size=1, max_size=30),
    tokens=st.integers(0, 1 << 20),
    draw=KEY,
    opens_document=st.booleans(),
)


@given(
    units=st.lists(st.lists(RECORD, max_size=30), max_size=4),
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
            for record in unit:
                writer.add(record)
            writer.flush()
            paths += writer.files
    whole = sorted(record for unit in units for record in unit if low <= record.key < high)
    held_out = read_range(paths, low, high, lowest_draw=0, end_of_draws=threshold)
    train = read_range(paths, low, high, lowest_draw=threshold, end_of_draws=KEYS)
    assert held_out == [record for record in whole if record.draw < threshold]
    assert train == [record for record in whole if record.draw >= threshold]
