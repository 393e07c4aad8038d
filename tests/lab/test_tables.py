"""Tables are Markdown whose columns of figures are aligned right."""

from albert_lab.tables import group_by, spread, table


def test_a_table():
    printed = table(("", "model", "MB", "speed"), [("a", "x", "1,2.5", ""), ("", "y 2", 3, "-")])
    assert printed.splitlines() == [
        "| | model | MB | speed |",
        "| --- | --- | ---: | ---: |",
        "| a | x | 1,2.5 | |",
        "| | y 2 | 3 | - |",
    ]
    figures = ["-1.2%", "1e-11", "+3.0 %", "1.7x", "4.2 (1 .. 5)"]
    for figure in figures:
        assert table(("a",), [(figure,)]).splitlines()[1] == "| ---: |", figure


def test_groups_keep_their_order():
    cells = [{"a": 2, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 3}]
    assert group_by(cells, ("a",)) == [[cells[0], cells[2]], [cells[1]]]


def test_spread():
    assert spread([3.0, 1.0, 2.0], ".1f") == "2.0 (1.0 .. 3.0)" and spread([5.0], ".0f") == "5"
