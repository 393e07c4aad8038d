"""phi is found in losses that follow its law; its script trains, and goes on."""

import math
import re

import pytest

from tests.command import run_python
from tools.lab.phi import PATTERNS, fit, summarise

BLOCKS = {  # of PATTERNS by hand: with a loop's runs, and those that it runs
    "loop:1,1x1,1": (2, 1, 1),
    "loop:1,2x1,1": (2, 2, 1),
    "loop:1,4x1,1": (2, 4, 1),
    "loop:1,1x2,1": (2, 1, 2),
    "loop:1,1x4,1": (2, 1, 4),
}


def losses_of(phi: float, a: float) -> dict[str, float]:
    """Of the law itself, with 0.1 nats a factor of e."""
    assert BLOCKS.keys() == {*PATTERNS}
    return {w: a - 0.1 * math.log(own + c * r**phi) for w, (own, c, r) in BLOCKS.items()}


@pytest.mark.parametrize("phi", [0.0, 0.46, 1.0])
def test_the_exponent_that_made_the_losses_is_found(phi):
    exponent, slope, left = fit(losses_of(phi, a=5.0))
    assert (exponent, slope) == pytest.approx((phi, 0.1), abs=1e-3) and left < 1e-6


def test_the_interval_is_that_of_the_seeds():
    seeds = {n: losses_of(phi, a=5 + n) for n, phi in enumerate((0.3, 0.5))}
    summary = summarise(seeds)
    # Student's t of one degree of freedom, times the standard error of 0.3 and 0.5.
    assert summary["phi"] == pytest.approx(0.4, abs=1e-3)
    assert summary["half"] == pytest.approx(12.706 * 0.1, abs=0.02)
    assert summarise({0: seeds[0]})["half"] is None


def test_patterns_that_say_nothing_are_refused(tmp_path):
    for patterns in (["all"], ["loop:1,1x1,1", "loop:1,1x2,1"], ["loop:1,1x1,1", "loop:1,2x1,1"]):
        words = ("--data", "x", "--output", tmp_path / "runs", "--patterns", *patterns)
        done = run_python("tools/lab/phi.py", *words)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_three_patterns_of_four_steps_give_a_number_of_the_flags_that_were_typed(data, tmp_path):
    patterns = ("loop:0,1x1,1", "loop:0,2x1,1", "loop:0,1x2,1")
    flags = "--model albert-tiny --hidden-size 32 --steps 4 --batch-size 8 --micro-batch-size 8 "
    flags += "--eval-every 4 --eval-samples 16 --sequence-length 32 --learning-rate 0.01 "
    flags += "--deepspeed_config ds_configs/zero0_fp32.json"
    words = ("--data", data, "--output", tmp_path / "runs", "--seeds", 1, "--patterns", *patterns)
    words = ("tools/lab/phi.py", *words, "--", *flags.split())
    first, again, other = (run_python(*words, *more) for more in ((), (), ("--batch-size", "16")))
    assert first.returncode == again.returncode == 0, first.stderr
    assert re.search(r"^phi -?[0-9.]+ no interval of one seed", first.stdout, re.MULTILINE)
    assert "0 of 4 steps done" in first.stdout and "0 of 4 steps done" not in again.stdout
    assert again.stdout.splitlines()[-6:] == first.stdout.splitlines()[-6:]
    assert other.returncode == 2 and "--batch-size is 16, but" in other.stderr
