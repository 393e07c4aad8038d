"""A check keeps what has finished, kills what takes too long, and its report says what failed.

The slow test runs the command on two fake devices.
"""

import json
import time
import weakref
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import torch
from albert_lab import host_time
from albert_lab.commands.gpu_check import main
from albert_lab.gpu_check import steps
from albert_lab.gpu_check.check import Check, Finding, ended, open_folder
from albert_lab.gpu_check.pieces import interrupt_and_resume, measure_speed, tell, train
from albert_lab.gpu_check.records import Records
from torch.profiler import DeviceType, ProfilerActivity

from albert_ds.base.errors import UserError
from tests.command import run_python
from tests.distributed import wait_for
from tests.fake_cuda.test_fake_cuda import fake_cuda  # noqa: F401 (a fixture)

ABOUT = {"device": "fake H200", "gpus": 1, "commit": "c0ffee", "quick": True}


@pytest.fixture
def check(tmp_path):
    open_folder(tmp_path / "report", ABOUT)
    return Check(folder=tmp_path / "report", gpus=1, quick=True)


def script(folder, text: str):
    path = folder / "script.py"
    path.write_text("import json, os, sys\nfrom pathlib import Path\n" + text)
    return path


COUNT = """
count = Path(__file__).with_name("count")
count.write_text(str(int(count.read_text()) + 1 if count.exists() else 1))
if Path(__file__).with_name("broken").exists():
    sys.exit("Error: it is broken")
Path(sys.argv[-1]).write_text(json.dumps({"says": "done"}))
"""


def test_what_passed_is_kept_and_what_failed_is_repeated(check, tmp_path):
    program = script(tmp_path, COUNT)
    broken = tmp_path / "broken"
    broken.touch()

    def look(check):
        cell = check.run("one/cell", program, seconds=60)
        return [ended("it runs", cell, cell["result"]["says"] if cell["result"] else "")]

    for runs, is_broken in ((1, True), (2, True), (3, False), (3, False)):
        if not is_broken:
            broken.unlink(missing_ok=True)
        look(check)
        assert check.write_report({"one": look}) != is_broken
        assert (tmp_path / "count").read_text() == str(runs)  # the report runs nothing
        says = "**FAIL** | code 1: Error: it is broken" if is_broken else "PASS | done"
        assert f"| it runs | {says} |" in (check.folder / "report.md").read_text()


def test_a_command_that_takes_too_long_ends_with_all_that_it_started(check, tmp_path):
    text = """
import subprocess
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True)
Path(__file__).with_name("pid").write_text(str(child.pid))
child.wait()
"""
    for seconds in (2, 8, 32, 128):  # on a busy machine it starts its own process later
        cell = check.run(f"one/{seconds}", script(tmp_path, text), seconds=seconds)
        assert cell["code"] is None and cell["last_words"] == f"still running after {seconds} s"
        if (tmp_path / "pid").exists() and (pid := (tmp_path / "pid").read_text()):
            break
    wait_for(lambda: has_ended(int(pid)), f"the end of process {pid}")


def has_ended(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_what_the_time_leaves_out_is_named_and_runs_the_next_time(check, tmp_path, monkeypatch):
    (tmp_path / "counts").mkdir()
    program = script(tmp_path / "counts", COUNT)

    def look(check):
        return [ended("it runs", check.run("one/cell", program, seconds=60), "done")]

    check.ends = time.monotonic()
    assert look(check) == [Finding(what="it runs", passed=None, says="left out: no time")]
    assert check.write_report({"one": look}) and not (tmp_path / "counts/count").exists()
    assert "Not run yet: one." in (check.folder / "report.md").read_text()
    # Begun, however little is left; with its 60 it would have ended by itself.
    monkeypatch.setattr("albert_lab.gpu_check.check.LEAST_SECONDS", float("-inf"))
    check.ends = time.monotonic() + 2
    sleeps = script(tmp_path, "import time; time.sleep(600)")
    cell = check.run("one/slow", sleeps, seconds=60)
    assert ended("it ends", cell).passed is None and "minutes were over" in cell["last_words"]
    check.ends += 600
    look(check)
    assert check.write_report({"one": look})
    assert "| it runs | PASS | done |" in (check.folder / "report.md").read_text()


def test_what_does_not_fit_into_memory_is_no_failure_and_leaves_room(tmp_path):
    """The next measurement begins without the tensors of the one before, whatever its end."""
    alive = []

    def fill(error: type[Exception] | None) -> dict:
        engine = torch.nn.Linear(2, 2)
        engine.itself = [engine]  # as an engine's hooks: only a collection frees it
        alive.append(weakref.ref(engine))
        assert sum(each() is not None for each in alive) == 1
        if error:
            raise error("no")
        return {}

    records = Records(tmp_path / "records.json", 1e9)
    for error in (torch.cuda.OutOfMemoryError, ValueError, None):
        records.measure("speed", partial(fill, error))
    assert [record["ok"] for record in records.all] == [None, False, True]
    assert tell(records.all[0]).says == "does not fit into the memory"


def test_an_annotation_over_kernels_is_no_kernel(monkeypatch):
    kernel = {"device_type": DeviceType.CUDA, "is_user_annotation": False}
    events = [SimpleNamespace(name="product", device_time=3.0, **kernel)] * 2
    over = SimpleNamespace(name="Optimizer.step#Lamb.step", device_time=6.0, **kernel)
    over.is_user_annotation = True
    trace = SimpleNamespace(events=lambda: [*events, over])
    monkeypatch.setattr(steps, "watch", lambda **_: nullcontext(trace))
    batch = SimpleNamespace(counts=SimpleNamespace(tokens=512))
    monkeypatch.setattr(steps, "take_step", lambda run: batch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(steps, "count_launches", lambda run: {"launches": 1.5})
    profile = steps.profile(None)
    kernels = {"kernel_us": 6, "kernels": 2, "launches": 1.5}
    assert profile == {**kernels, "tokens": 512, "largest": [("product", 2, 6)]}


def test_launches_are_those_of_kernels_and_graphs_in_the_passes_of_a_micro_batch(monkeypatch):
    names = ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaMemcpyAsync"]
    events = [SimpleNamespace(name=name, device_type=DeviceType.CPU) for name in names]
    events += [SimpleNamespace(name="LaunchedKernel", device_type=DeviceType.CUDA)]
    trace = SimpleNamespace(events=lambda: events)
    done = []
    monkeypatch.setattr(host_time, "profile", lambda **_: nullcontext(trace))
    monkeypatch.setattr(host_time, "supported_activities", lambda: {ProfilerActivity.CUDA})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host_time, "next_batch", lambda run: SimpleNamespace(micro_batches=[1, 2]))
    for part in ("run_passes", "update"):
        monkeypatch.setattr(host_time, part, lambda run, batch, part=part: done.append(part))
    assert host_time.count_launches(None) == {"launches": 1.5}
    assert done == ["run_passes", "update"]
    monkeypatch.setattr(host_time, "supported_activities", set)
    assert host_time.count_launches(None) == {} and len(done) == 2


def test_another_machine_needs_another_folder(check):
    open_folder(check.folder, ABOUT)
    with pytest.raises(UserError, match="holds a check with device fake H200, this one has A100"):
        open_folder(check.folder, {**ABOUT, "device": "A100"})


def test_the_report_names_failures_and_says_that_the_device_is_fake(check):
    turn = {"tokens_a_second": 100, "mfu": 0.46, "peak_gb": 1.0, "reserved_gb": 1.2}
    turn |= {"step_seconds": 0.2, "fastest": 0.1, "slowest": 0.3, "data_wait": 0.04}
    turn |= {"step_seconds_p90": 0.25, "host_ms": 4.5, "update_ms": 2.0, "by_graph": 0.98}
    turn["profile"] = {
        "kernels": 7,
        "launches": 9,
        "kernel_us": 150_000,
        "tokens": 30,
        "largest": [["gemm", 4, 75_000]],
    }
    size = {"kind": "speed", "what": "speed, size albert-tiny"}
    late = {"kind": "speed", "what": "speed, size bert-large", "error": "left out: no time"}
    report = {"records": [{**size, "ok": True, "found": turn}, {**late, "ok": None}]}
    done = {"code": 0, "seconds": 1.0, "last_words": "", "result": report}
    (check.folder / "cells/speed").mkdir(parents=True)
    (check.folder / "cells/speed/all.json").write_text(json.dumps(done))
    bad = Finding(what="exact", passed=False, says="off by 2")
    pieces = {"exactness": lambda check: [bad], "speed": measure_speed}
    assert not check.write_report({**pieces, "resume": interrupt_and_resume})
    text = (check.folder / "report.md").read_text()
    assert "# FAIL: 1 of 6 rows" in text and "fake H200" in text and "device: fake" in text
    assert "| exact | **FAIL** | off by 2 |" in text and "Not run yet: resume." in text
    says = "100 tokens/s, MFU 46.0%; 1.0 GB, reserved 1.2; a step 0.2000 s (0.1000 .. 0.3000)"
    says = says[:-1] + "; 90 %: 0.2500), 4.0% of it waiting for data"
    says += "; host 4.5 ms a micro-batch, 2.0 an update, 98.0% by graphs"
    assert f"| speed, size albert-tiny | PASS | {says} |" in text
    assert (
        "| 9 launches a micro-batch; 7 kernels take 150.0 ms on the device of a step of 300.0 ms |"
        in text
    )
    assert "| 50.0%, 4 times | - | `gemm` |" in text
    assert "| speed, size bert-large | - | left out: no time |" in text


@pytest.mark.parametrize("line", ["", '{"step": 5, "mlm_loss": 9.1, "tokens_per_second": 1.0}'])
def test_a_training_too_short_for_an_evaluation_loses_no_other_piece(check, line):
    ended = {"code": 0, "seconds": 60.0, "last_words": "", "result": None}
    for path, text in (
        ("cells/train/run.json", json.dumps(ended)),
        ("runs/train/metrics.jsonl", line),
    ):
        (check.folder / path).parent.mkdir(parents=True)
        (check.folder / path).write_text(text)
    good = Finding(what="other", passed=True, says="")
    assert check.write_report({"one": lambda check: [good], "train": train})
    report = (check.folder / "report.md").read_text()
    assert "| other | PASS |" in report and "over before the first evaluation" in report
    assert (check.folder / "loss.jsonl").read_text() == line


def test_without_cuda_and_with_a_wrong_name_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="no CUDA device"):
        main(["--output", str(tmp_path / "report")])
    with pytest.raises(UserError, match="--piece lamb: allowed: machine, smoke, speed"):
        main(["--output", str(tmp_path / "report"), "--piece", "lamb"])
    with pytest.raises(UserError, match="no index.json here"):
        main(["--output", str(tmp_path / "report"), "--data", str(tmp_path)])
    assert not (tmp_path / "report").exists()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_two_devices_are_checked_on_the_fake_device(fake_cuda, tmp_path):  # noqa: F811
    """And tests/gpu run there; the other pieces of one device: fake_cuda/test_gpu_kit.py."""
    command = ("-m", "tests.fake_cuda", "--devices", "2", "tools/gpu_check.py", "--quick")
    done = run_python(*command, "--output", tmp_path, "--minutes", 28, "--piece", "gpus", "tests")
    report = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, report
    assert report.startswith("# PASS: fake H200") and "device: fake" in report
    ran = {line[3:] for line in report.splitlines() if line.startswith("## ")}
    assert ran == {"gpus", "tests", "fusedlamb"}  # every report says that this device has no nvcc
