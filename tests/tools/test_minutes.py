"""tools/gpu_kit/minutes.sh with a stand-in for Python: what it asks for, and what it refuses."""

import sys

import pytest

from tests.command import run_bash, write_scripts

# Programs that a card with memory for micro-batches of two runs; what is read from stdin is real.
SMALL_CARD = f"""[ "$1" = - ] && exec {sys.executable} "$@"
echo "$@" >> "$ASKED"
module=$2
while [ $# -gt 0 ]; do
    case $1 in
        --output) mkdir -p "$2"; echo {{}} > "$2/config.json"; folder=$2 ;;
        --micro-batch-size) micro=$2 ;;
    esac
    shift
done
if [ $module = albert_ds ] && [ "$micro" -gt 2 ]; then
    echo "out of GPU memory: lower --micro-batch-size"
    exit 2
fi
for n in 10 20; do
    [ $module != albert_ds ] || mkdir -p "$folder/checkpoints/step-000000$n"
done
for n in {{1..12}}; do echo '{{"step": '$n', "step_seconds": '$n'}}'; done > "$folder/metrics.jsonl"
echo '{{"step": 10, "heldout_mlm_loss": 3.0}}' >> "$folder/metrics.jsonl"
echo "{{\\"step\\": 20, \\"heldout_mlm_loss\\": ${{LAST:-2.5}}}}" >> "$folder/metrics.jsonl"
"""


def run_minutes(folder, data, **environ):
    path = write_scripts(folder / "bin", python=SMALL_CARD)
    given = {"DATA": data, "LENGTH": 64, "PIECES": 800, "QUICK": 1, "WORK": folder / "work"}
    given |= {"OUT": folder / "out", "PY": folder / "bin" / "python", "ASKED": folder / "asked"}
    return run_bash("tools/gpu_kit/minutes.sh", **path, **given | environ)


def test_minutes_of_a_card_with_less_memory_take_smaller_micro_batches_of_the_same_batch(
    data, tmp_path
):
    done = run_minutes(tmp_path, data, FIRST=1)
    assert done.returncode == 0, done.stdout + done.stderr
    says = [line.partition(" s: ")[2] for line in done.stdout.splitlines()]
    assert [line.split(":")[0] for line in says[:-1]] == [
        "micro-batches of 4",
        "micro-batches of 2",
    ]
    # Half of the steps at a depth, the later ones, are taken: the medians of 4 to 6 and 10 to 12.
    assert says[-1].startswith("a step of 8 sequences takes 8.0 s,")
    trials = [x for x in (tmp_path / "asked").read_text().splitlines() if " train " in x]
    assert len(trials) == 3 and all("--batch-size 8 " in trial for trial in trials)


@pytest.mark.parametrize(
    ("last", "exported"), [(2.5, "run"), (3.2, "run/checkpoints/step-00000010")]
)
def test_minutes_whose_loss_has_risen_export_the_best_checkpoint(data, tmp_path, last, exported):
    done = run_minutes(tmp_path, data, LAST=last, SCORES=20)
    asked = (tmp_path / "asked").read_text().splitlines()
    (export,) = (line for line in asked if " export " in line)
    assert f" --checkpoint {tmp_path}/work/{exported} " in export
    assert ("step-00000010 is exported" in done.stdout) == (exported != "run")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"LENGTH": 128}, "has 64 tokens and 800 pieces; must be 128 and 800 (LENGTH, PIECES)"),
        ({"PIECES": 900}, "has 64 tokens and 800 pieces; must be 64 and 900 (LENGTH, PIECES)"),
        ({"DATA": "nowhere"}, "DATA: nowhere"),
        ({"DATA": None}, "DATA is not set"),
        ({"MINUTES": "x"}, "MINUTES=x: must be a number"),
        ({"MINUTES": 1.5, "QUICK": None}, "20 or more beside SCORES=60 seconds"),
    ],
)
def test_minutes_refuse_wrong_input_in_one_line(data, tmp_path, change, words):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "speed").write_text("0.5 8\n")
    done = run_minutes(tmp_path, data, **change)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stdout + done.stderr
    assert words in done.stderr
