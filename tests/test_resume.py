"""A resumed run equals an uninterrupted one bit for bit; a stop request ends every rank."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from albert_ds.checkpoint.folder import find_newest
from albert_ds.process.stop_request import POLL_SECONDS
from tests.command import kill_in_evaluation
from tests.conftest import ROOT, finish, start_ranks, train_command
from tests.distributed import take_port, wait_for
from tests.legs import Case, Layout, files_of, pretrain, records, run_case


def wait_for_step(run: Path, step: int) -> None:
    path = run / "metrics.jsonl"
    wait_for(lambda: path.exists() and f'{{"step": {step},' in path.read_text(), f"step {step}")


def history(run: Path) -> list[tuple]:
    """Each start with its ranks and each end with its code and step, oldest first."""
    events = map(json.loads, (run / "history.jsonl").read_text().splitlines())
    keys = {"start": ("ranks",), "end": ("code", "step")}
    return [(e["event"], *(e[key] for key in keys[e["event"]])) for e in events]


def test_kill_9_and_resume_equals_the_uninterrupted_run(data, tmp_path):
    # Dropout is on, the batch is accumulated, and the kill comes between two checkpoints.
    config = dict(dropout=0.1, batch_size=16, num_workers=1, average=0.9)
    case = Case(config=config, cuts=(10,), layout=Layout(data_parallel=2))
    broken = run_case(case, data, folder=tmp_path).cut
    assert (broken / "checkpoints" / "step-00000012" / "average.safetensors").exists()
    assert json.loads((broken / "exit.json").read_text())["code"] == 0
    assert history(broken) == [("start", 2), ("start", 2), ("end", 0, 12)]


def test_a_run_killed_in_an_evaluation_has_its_checkpoint_and_evaluates_again(data, tmp_path):
    flags = dict(steps=4, save_every=2, eval_every=2)
    case = Case(config=flags, cuts=(2,), fault=kill_in_evaluation)
    broken = run_case(case, data, folder=tmp_path).cut
    state = broken / "checkpoints" / "step-00000004" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"samples": 33}))
    assert finish(start_ranks(train_command(data, broken, **flags | {"steps": 5}), 1)) == [3]
    reason = json.loads((broken / "exit.json").read_text())["reason"]
    assert reason == f"{state}: samples 33: must be 32"


def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_next_run_goes_on(data, tmp_path):
    # The next run has another layout: ZeRO-1 for 3, tensor parallelism for data parallelism.
    run = tmp_path / "run"
    first = dict(steps=100_000, deepspeed_config="ds_configs/zero3_bf16.json", eval_every=2)
    ranks = start_ranks(train_command(data, run, **first), 2)
    wait_for_step(run, 3)
    ranks[1].send_signal(signal.SIGUSR1)
    assert finish(ranks) == [75, 75]
    ending = json.loads((run / "exit.json").read_text())
    assert ending["code"] == 75
    step = ending["step"]
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{step:08d}"
    again = dict(deepspeed_config="ds_configs/zero1_bf16.json", tensor_parallel=2)
    again |= dict(steps=step + 2, micro_batch_size=4)
    pretrain(data, run, ranks=2, **again)
    steps = [record["step"] for record in records(run) if "samples" in record]
    assert steps == list(range(1, step + 3))


def test_a_lost_peer_ends_the_others_with_5_and_the_lock_dies_with_its_owner(data, tmp_path):
    run = tmp_path / "run"
    ranks = start_ranks(train_command(data, run, steps=100_000), 2)
    wait_for_step(run, 5)
    ranks[1].kill()
    assert finish(ranks) == [5, -signal.SIGKILL]
    ending = json.loads((run / "exit.json").read_text())
    assert ending["code"] == 5 and ending["reason"].startswith("rank 1 on ")
    assert "is missing" in ending["reason"]
    pretrain(data, run, steps=ending["step"] + 1)
    first, lost, second, done = history(run)
    assert (first, lost[:2]) == (("start", 2), ("end", 5)) and second == ("start", 1)
    assert done[:2] == ("end", 0)


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["deepspeed --num_gpus", "torchrun --nproc_per_node"])
def test_killing_the_launcher_leaves_no_rank_behind(data, tmp_path, launcher):
    run = tmp_path / "run"
    programs = Path(sys.executable).parent
    command = train_command(data, run, steps=100_000)[1:]
    process = subprocess.Popen(
        [*f"{programs}/{launcher} 2 --master_port {take_port()}".split(), *command],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
    )
    wait_for_step(run, 2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs(children, timeout=180)
    assert not alive
    ending = json.loads((run / "exit.json").read_text())
    assert ending["code"] == 75
    # Whichever rank notices first tells the other.
    assert "launcher is gone" in ending["reason"] or "another rank was asked" in ending["reason"]
    assert history(run) == [("start", 2), ("end", 75, ending["step"])]


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["", "-m torch.distributed.run --master_port PORT"])
def test_a_run_outlives_the_shell_that_started_it(data, tmp_path, launcher):
    run = tmp_path / "run"
    launcher = launcher.replace("PORT", str(take_port()))
    wait = f"until grep -q '\"step\": 2,' {run}/metrics.jsonl 2> /dev/null; do sleep 0.1; done"
    python, *script = train_command(data, run, steps=100_000)
    line = f'nohup {python} {launcher} "$@" > /dev/null 2>&1 & {wait}'
    subprocess.run(["bash", "-c", line, "bash", *script], cwd=ROOT, check=True)
    # The shell is gone. By the trainer's own clock it has looked for its launcher since then.
    begun = (run / "metrics.jsonl").read_text().count("\n")

    def looked() -> bool:
        lines = (run / "metrics.jsonl").read_text().split("\n")[begun:-1]
        return sum(json.loads(line).get("step_seconds", 0) for line in lines) > 3 * POLL_SECONDS

    wait_for(looked, "steps after the end of the shell")
    (run / "STOP").touch()
    wait_for((run / "exit.json").exists, "exit.json")
    assert "STOP exists" in json.loads((run / "exit.json").read_text())["reason"]


def test_a_stop_file_and_the_time_budget_end_with_75_and_a_complete_checkpoint(data, tmp_path):
    run = tmp_path / "run"
    flags = dict(save_every=1000, eval_every=1000)
    # Rank 0 alone looks at the file.
    ranks = start_ranks(train_command(data, run, steps=100_000, **flags), 2)
    wait_for_step(run, 3)
    (run / "STOP").touch()
    assert finish(ranks) == [75, 75]
    ending = json.loads((run / "exit.json").read_text())
    assert "STOP exists" in ending["reason"] and ending["step"] >= 3
    saved = run / "checkpoints" / f"step-{ending['step']:08d}"
    assert find_newest(run) == (saved, [])
    before = files_of(saved)
    # The budget is over before the first step: nothing is lost and nothing is written again.
    (run / "STOP").unlink()
    hurried = train_command(data, run, steps=100_000, max_hours=1e-6, **flags)
    assert finish(start_ranks(hurried, 1)) == [75]
    again = json.loads((run / "exit.json").read_text())
    assert "--max-hours" in again["reason"] and again["step"] == ending["step"]
    assert files_of(saved) == before
    # With all steps done in time the same flag ends with 0.
    pretrain(data, run, steps=ending["step"] + 2, max_hours=1, **flags)
    assert [record["step"] for record in records(run) if "samples" in record] == list(
        range(1, ending["step"] + 3)
    )
