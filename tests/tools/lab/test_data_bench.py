"""The bench reads the same shards in every way and says where the time goes."""

import pytest

from albert_ds.errors import UserError
from tools.lab.data_bench import KINDS, main


@pytest.fixture(autouse=True)
def keep_process(monkeypatch):
    """The bench binds its process to one core and to one thread; the tests' process stays free."""
    import os

    import torch

    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def test_reading_is_compared_profiled_and_resumed(data, capsys):
    main(["--data", str(data), "--samples", "32", "--repeats", "1"])
    printed = capsys.readouterr().out
    for row in (*KINDS, "Hugging Face's collator", "masking.py: draw_positions", "from 10^9"):
        assert f"| {row} |" in printed, printed


def test_text_needs_a_vocabulary():
    with pytest.raises(UserError, match="--vocab"):
        main(["--input", "text"])
