"""The package as a stranger has it: a wheel in a new environment, an empty folder, no clone."""

import os
import re
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import albert_ds
from tests.command import ROOT, run_bash, run_program, write_scripts
from tests.distributed import take_port
from tests.recipes import JOB

pytestmark = pytest.mark.nightly
BUILT = ("albert_ds", "tools", "ds_configs", "recipes", "slurm", "docs/raw", "pyproject.toml")
BUILT += ("README.md", "LICENSE", "setup.py")
SMALL = ("--num-layers", "1", "--hidden-size", "32", "--embedding-size", "16", "--num-heads", "4")


def copy_source(folder: Path) -> None:
    for name in BUILT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        options = {"symlinks": True} if copy is shutil.copytree else {}
        copy(ROOT / name, folder / name, **options)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The bin folder of an environment with the wheel; other packages are those of this one.

    A .pth file names their folder, so that its own .pth files, which lead to the clone, are unread.
    """
    folder = tmp_path_factory.mktemp("installed")
    copy_source(folder / "source")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index"]
    wheel = [*pip, "wheel", *alone, "--no-build-isolation", "--wheel-dir", folder]
    subprocess.run([*wheel, folder / "source"], check=True)
    shutil.rmtree(folder / "source")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    (wheel_file,) = folder.glob("*.whl")
    into = [*pip, "--python", python, "install", *alone]
    # What lies on PYTHONPATH counts as installed.
    subprocess.run([*into, wheel_file], check=True, env={**os.environ, "PYTHONPATH": ""})
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    return python.parent


def relative_links(text: str) -> list[str]:
    return re.findall(r"\]\((?!https://)[^)]+\)", text)


def test_a_release_is_checked_and_starts_and_its_links_lead_to_its_source(tmp_path):
    copy_source(tmp_path)
    assert relative_links((tmp_path / "README.md").read_text())
    settings = tmp_path / "pyproject.toml"
    of_source = '[project.urls]\nSource = "https://example.org/albert-ds"\n'
    settings.write_text(settings.read_text().replace("[project.urls]\n", of_source))
    done = run_program("bash", "tools/release.sh", sys.executable, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    wheel, source = sorted((tmp_path / "build" / "release").iterdir(), key=lambda x: x.suffix)[::-1]
    assert (wheel.suffix, source.suffix) == (".whl", ".gz")
    for file in (wheel, source):
        assert f"{file.name}: {albert_ds.__version__} /" in done.stdout
        assert f"{file.name}: {albert_ds.__version__} {tmp_path}" not in done.stdout  # no clone
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith("/METADATA"))
        page = opened.read(name).decode()
    assert not relative_links(page)
    tree = f"https://example.org/albert-ds/blob/v{albert_ds.__version__}"
    assert f"]({tree}/docs/exactness.md)" in page


def test_without_a_source_the_page_of_the_package_has_no_link_that_leads_nowhere(installed):
    (page,) = installed.parent.glob("lib/python*/site-packages/albert_ds-*.dist-info/METADATA")
    text = page.read_text()
    assert "# albert-ds" in text and not relative_links(text)


@pytest.mark.timeout(1200)  # a dozen programs that import torch, one after the other
def test_every_step_in_an_empty_folder(installed, text_file, tmp_path):
    alone = {"cwd": tmp_path, "PYTHONPATH": None, "VIRTUAL_ENV": None}
    path = f"{installed}:{os.environ['PATH']}"

    def ask(*words) -> str:
        done = run_program(*words, **alone, PATH=path)
        assert done.returncode == 0, (words, done.stderr[-3000:])
        return done.stdout

    def albert(*words) -> str:
        return ask("albert-ds", *words)

    trainer = Path(albert("path", "train").strip())
    assert trainer.is_file() and trainer.is_relative_to(installed.parent)
    albert("recipes", "--output", ".")
    albert("vocab", "--input", text_file, "--output", "vocab", "--vocab-size", 800)
    shards = ("--vocab", "vocab/spiece.model", "--sequence-length", 64, "--holdout", 0.05)
    albert("shards", "--input", text_file, "--output", "data", *shards)
    assert "sequences" in albert("inspect", "--data", "data", "--count", 50, "--show", 1)

    # One run: the command begins it, two ranks of a launcher take it further.
    flags = ("--model", "albert-tiny", *SMALL, "--data", "data", "--output", "run")
    flags += ("--batch-size", 4, "--micro-batch-size", 2)
    flags += ("--deepspeed_config", "ds_configs/zero1_fp32.json")
    albert("train", *flags, "--steps", 2)
    launcher = ("python", "-m", "deepspeed.launcher.runner", "--master_port", take_port())
    ask(*launcher, "--num_gpus", 2, "--module", "albert_ds.train", *flags, "--steps", 4)
    records = (tmp_path / "run/metrics.jsonl").read_text()
    assert all(f'"step": {step},' in records for step in (2, 4))

    assert "MLM accuracy" in albert("probe", "--checkpoint", "run", "--data", "data")
    albert("export", "--checkpoint", "run", "--output", "hf")
    assert "%" in albert("fill-mask", "--checkpoint", "hf", "This is a [MASK].")
    albert("report", "run", "--output", "report.html")
    assert "<html" in (tmp_path / "report.html").read_text()
    cluster = ("--gpus", 8, "--link", 100, "--steps", 1000)
    assert "PREDICTED" in albert("plan", "--model", "albert-base", *cluster)

    # A recipe starts the installed trainer, with files that it finds here.
    write_scripts(tmp_path, srun='echo "$@"', scontrol="echo node1")
    job = {**JOB, "DATA": "data", "PATH": f"{tmp_path}:{path}"}
    done = run_bash("slurm/smoke.sh", **alone, **job)
    assert " python -u -m albert_ds train --output runs/albert-smoke " in done.stdout, done.stderr
    assert (tmp_path / done.stdout.split("--deepspeed_config ")[1].split()[0]).is_file()
