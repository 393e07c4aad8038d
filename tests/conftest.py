"""Shared by all tests: shards of the Python manual's text, and a way to start ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from albert_lab.ranks import find_port, rank_environment
from hypothesis import HealthCheck, settings

from tests.command import run_command
from tests.distributed import METHOD, Program

ROOT = Path(__file__).parents[1]
TRAINERS = [[sys.executable, f"albert_ds/{name}.py"] for name in ("train", "finetune")]
# Folders whose tests wait for minutes, need root or a compiler: `make nightly`.
NIGHTLY = [ROOT / "tests" / name for name in ("fake_cuda", "slurm")]
# The same examples every time, and no deadline: a busy machine is not a failure.
LENIENT = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
UNTIMED = {"deadline": None, "database": None, "suppress_health_check": LENIENT}
settings.register_profile("project", derandomize=True, **UNTIMED)
settings.load_profile("project")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines report AMX and stop a bf16 matrix product of oneDNN with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Kernels on tensors of the host; Triton reads it when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# pytest turns warnings into errors in its own process; this does it in those that tests start.
STRICT = str(ROOT / "tests" / "strict")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STRICT, os.environ.get("PYTHONPATH")]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if not {*item.path.parents}.isdisjoint(NIGHTLY):
            item.add_marker("nightly")


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Undo what a tool that runs in pytest's own process changes in the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """English prose: the reference manual inside Python, a blank line between documents."""
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "topics.txt"
    documents = ("\n".join(filter(str.strip, text.splitlines())) for text in topics.values())
    path.write_text("\n\n".join(documents), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def data(text_file, tmp_path_factory) -> Path:
    """A built folder: 800 pieces, sequences of at most 64 tokens, several shards, 5 % held out."""
    folder = tmp_path_factory.mktemp("data")
    vocab = ("--output", folder / "vocab", "--vocab-size", 800)
    shards = ("--vocab", folder / "vocab" / "spiece.model", "--output", folder / "shards")
    shards += ("--sequence-length", 64, "--holdout", 0.05)
    for command, flags in (("vocab", vocab), ("shards", shards)):
        done = run_command(command, "--input", text_file, *flags)
        assert done.code == 0, done.err
    return folder / "shards"


@pytest.fixture(scope="session")
def vocab(text_file):
    """300 pieces; tests of a folder may have another one."""
    from albert_ds.vocab.vocab import Normalisation, train_vocab

    lines = text_file.read_text(encoding="utf-8").splitlines()[:3000]
    return train_vocab(lines, Normalisation(), vocab_size=300)


@pytest.fixture(scope="session")
def checkpoint(vocab, tmp_path_factory) -> Path:
    """A pretraining run to start from, as it is left behind. Nobody writes to it."""
    from tests.finetuning import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("pretrained"), vocab)


@pytest.fixture(scope="session")
def cola(tmp_path_factory) -> Path:
    from tests.finetuning import write_cola

    return write_cola(tmp_path_factory.mktemp("tasks") / "CoLA")


def train_command(data: Path, output: Path, **flags) -> list[str]:
    """train.py on a very small model; keyword arguments are flags, in the order given."""
    given = {
        **dict(model="albert-tiny", data=data, output=output, steps=12),
        **dict(batch_size=8, micro_batch_size=2),
        **dict(num_layers=2, hidden_size=32, embedding_size=16),
        **dict(log_every=1, eval_every=6, eval_samples=8, save_every=4),
        **flags,
    }
    argv = [sys.executable, "albert_ds/train.py", "--deepspeed_config"]
    argv.append(str(given.pop("deepspeed_config", "ds_configs/zero1_fp32.json")))
    for name, value in given.items():
        argv += [
            "--" + name.replace("_", "-"),
            *map(str, value if type(value) is list else [value]),
        ]
    return argv


def start_ranks(command: list[str], world_size: int) -> list[subprocess.Popen | Program]:
    """Start one process per rank, with the variables that torchrun or deepspeed would set.

    A trainer is forked from a process that has imported its libraries, which takes 8 s. More ranks
    than GPUs run on the CPU: NCCL takes one rank a GPU.
    """
    return start_each([command] * world_size)


def start_each(
    commands: list[list[str]], variables: dict[int, dict[str, str]] | None = None
) -> list[subprocess.Popen | Program]:
    """Start a process for each rank with its own command; `variables` by rank win."""
    import torch

    world_size = len(commands)
    share_gpu = 0 < torch.cuda.device_count() < world_size
    meeting = find_port()
    environments = [
        {
            **os.environ,
            **({"DS_ACCELERATOR": "cpu"} if share_gpu else {}),
            **rank_environment(rank, world_size, rank),
            **meeting,
            **(variables or {}).get(rank, {}),
        }
        for rank in range(world_size)
    ]
    given = list(zip(commands, environments, strict=True))
    is_trainer = all(command[:2] in TRAINERS for command in commands)
    if METHOD == "forkserver" and is_trainer and "FAKE_CUDA_FOLDER" not in os.environ:
        return [Program(command[1:], cwd=ROOT, env=env) for command, env in given]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen(command, cwd=ROOT, env=env, **pipes) for command, env in given]


def finish(processes: list[subprocess.Popen | Program], timeout: float = 500) -> list[int]:
    """Wait for all ranks; returns their exit codes. pytest shows their output if the test fails."""
    for process in processes:
        out, err = process.communicate(timeout=timeout)
        print(out[-3000:], err[-3000:], sep="\n")
    return [process.returncode for process in processes]
