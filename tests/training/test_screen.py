"""What a run shows: lines in columns, facts that hold, a bar that stays the last line."""

import io
import logging
import sys
import warnings

import pytest

from albert_ds.process.quiet import quiet_libraries
from albert_ds.training.screen import Screen, format_step, print_facts

VALUES = dict(samples=24, loss=7.366, mlm_loss=6.6718, mlm_accuracy=0.037, sop_loss=0.6948)
VALUES |= dict(sop_accuracy=0.318, lr=0.001467, grad_norm=1.387, tokens_per_second=1613.0)
VALUES |= dict(mfu=None, flops=79_991_808, skipped_steps=0)
HELD_OUT = dict(heldout_loss=7.3, heldout_mlm_loss=6.645, heldout_mlm_accuracy=0.032)
HELD_OUT |= dict(heldout_sop_loss=0.686, heldout_sop_accuracy=0.875, heldout_masked=63)
TUNED = {key: VALUES[key] for key in ("loss", "lr", "grad_norm", "tokens_per_second")}


def test_the_look_of_the_lines():
    lines = [
        format_step(300, 125000, VALUES, 42840.0),
        format_step(10300, 125000, VALUES | {"mlm_loss": 10.31, "grad_norm": 0.013}, 125.0),
        format_step(11000, 125000, HELD_OUT),
        format_step(11000, 125000, VALUES | {"exit_loss": 3.24, "z_loss": 0.01}, 125.0),
        format_step(50, 1200, TUNED, 3.4),
        format_step(120, 1200, {"dev_matthews": 0.51, "dev_accuracy": None}),
    ]
    assert lines == [
        "step    300 of 125000  mlm  6.672   3.7%  sop  0.695  31.8%  lr 1.5e-03  norm     1.4"
        "  1.61k tok/s  left 11.9 h",
        "step  10300 of 125000  mlm 10.310   3.7%  sop  0.695  31.8%  lr 1.5e-03  norm   0.013"
        "  1.61k tok/s  left  2 min",
        "step  11000 of 125000  mlm  6.645   3.2%  sop  0.686  87.5%  held out",
        "step  11000 of 125000  mlm  6.672   3.7%  sop  0.695  31.8%  exit  3.240  z  0.010"
        "  lr 1.5e-03  norm     1.4  1.61k tok/s  left  2 min",
        "step   50 of 1200  loss  7.3660  lr 1.5e-03  norm     1.4  1.61k tok/s  left    3 s",
        "step  120 of 1200  dev  matthews 0.5100  accuracy      -",
    ]


EXTREMES = {"mlm_loss": 11.513, "mlm_accuracy": 1.0, "sop_accuracy": 0.9999, "grad_norm": 1.4e12}
EXTREMES |= {"tokens_per_second": 161.3e6, "mfu": 0.412}


@pytest.mark.parametrize("left", [0.0, 99.4, 99.6, 5999.0, 356_000.0, 360_001.0, 8.6e7])
def test_no_line_is_wider_than_120_columns(left):
    line = format_step(10**5, 999_999, VALUES | EXTREMES, left)
    assert len(line) <= 120
    narrow = format_step(10**5, 999_999, VALUES | {"mfu": 0.05}, 1.0)
    for word in ("mlm", "sop", "lr", "norm", "tok/s", "mfu", "left"):
        assert line.index(word) == narrow.index(word)


def test_what_does_not_exist_keeps_its_column_and_skipped_steps_are_said():
    values = VALUES | {"grad_norm": None, "sop_loss": None, "sop_accuracy": None}
    first, line = format_step(3, 12, values | {"skipped_steps": 2}, 1.0).splitlines()
    assert first == "step  3 of 12  2 steps skipped: the gradient was not finite"
    assert line.index("tok/s") == format_step(3, 12, VALUES, 1.0).index("tok/s")
    assert "sop      -      -" in line


def warn(message: str, category: type[Warning], module: str) -> None:
    warnings.warn_explicit(message, category, f"{module}.py", 1, module=module)


def test_named_warnings_are_silent_and_all_others_are_not(caplog, monkeypatch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_libraries()
        gone = "Transformer Engine and Apex are not installed. Falling back"
        warn(gone, UserWarning, "megatron.core.optimizer.clip_grads")
        old = "`torch.distributed.all_gather_into_tensor` is deprecated. Please use"
        warn(old, FutureWarning, "torch.distributed.c10d_logger")
        assert not caught
        warn(gone, UserWarning, "albert_ds.train")
        warn("another", UserWarning, "megatron.core.optimizer.clip_grads")
        warn("`torch.load` is deprecated", FutureWarning, "torch.distributed.c10d_logger")
        assert len(caught) == 3
    logger = logging.getLogger("DeepSpeed")
    monkeypatch.setattr(logger, "propagate", False)  # where DeepSpeed is imported, it is already
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    logger.warning("**** You are using ZeRO with an untested optimizer, proceed ****")
    logger.warning("Setting accelerator to CPU. If you have GPU or other accelerator, ...")
    logger.warning("out of memory")
    assert caplog.messages == ["out of memory"]


def test_facts_are_lines_and_show_no_password(capsys):
    print_facts("pretraining: runs/a", {"data": "http://me:secret@host/shards"})
    assert capsys.readouterr().out == (
        "pretraining: runs/a\n  data        http://me:***@host/shards\n"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        """The lines that stand on the terminal: a return goes to the beginning of the line."""
        lines = []
        for line in self.getvalue().split("\n"):
            text = ""
            for part in line.replace("\x1b[A", "").split("\r"):
                text = part + text[len(part) :]
            lines.append(text.rstrip())
        return lines


def test_on_a_terminal_the_bar_stays_the_last_line(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    screen = Screen(step=0, num_steps=4)
    for step in (1, 2, 3):
        screen.advance(step)
    screen.write(2, TUNED)
    print("albert-ds: saved step 2", file=sys.stderr)
    time, *lines, bar = terminal.shown()
    assert " for the other 2 steps, if all are as fast as step 2" in time
    assert lines[0].startswith("step 2 of 4  loss") and lines[1:] == ["albert-ds: saved step 2"]
    assert "3/4" in bar
    screen.close()
    assert sys.stdout is sys.stderr is terminal


def test_the_time_left_is_that_of_the_steps_after_the_first(monkeypatch, capsys):
    from albert_ds.training import screen as module

    clock = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    screen = Screen(step=10, num_steps=110)
    clock[0] = 150.0
    screen.advance(11)
    screen.write(11, TUNED)
    assert "left" not in capsys.readouterr().out
    for step, clock[0], left in ((12, 160.0, "16 min"), (20, 159.0, "90 s"), (60, 200.0, "51 s")):
        screen.advance(step)
        told = capsys.readouterr().out
        assert (f"  time        {left} for the other 98 steps, if all are" in told) is (step == 12)
        screen.write(step, TUNED)
        assert capsys.readouterr().out.rstrip().endswith(f"left {left:>6}")
