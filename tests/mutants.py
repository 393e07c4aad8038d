"""`make mutants`: remove each fix in a copy of the tree, run its test, and check that it fails.

A test that passes without its fix proves nothing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.exactness.document import replace_section

ROOT = Path(__file__).parents[1]
COPIED = ("albert_ds", "tests", "ds_configs", "tools", "pyproject.toml")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A fix, the text that replaces it, and the test that must then fail."""

    trap: str
    file: str
    fix: str  # occurs once in `file`
    without: str
    test: str


MUTANTS = (
    Mutant(
        trap="random numbers of each rank's own on replicated activations",
        file="albert_ds/training/pretrain.py",
        fix="seed_step(run.config.seed, run.step, run.mesh.dp_rank)",
        without="seed_step(run.config.seed, run.step, run.mesh.rank)",
        test="tests/test_traps.py::test_dropout_on_replicas_is_the_same_on_all_peers",
    ),
    Mutant(
        trap="random numbers that a rank's heads share with those of its peers",
        file="albert_ds/parallel/tensor.py",
        fix="child.rank = mesh.tp_rank ",
        without="child.rank = 0 ",
        test="tests/parallel/test_tensor.py::"
        "test_dropout_agrees_on_replicas_differs_on_shards_and_is_replayed_by_checkpointing",
    ),
    Mutant(
        trap="reentrant checkpointing of a shared block under ZeRO-2",
        file="albert_ds/model/encoder.py",
        fix="ffn(attention(y, *tokens)), x, use_reentrant=False)",
        without="ffn(attention(y, *tokens)), x, use_reentrant=True)",
        test="tests/test_traps.py::test_a_checkpointed_shared_block_is_reduced_once_and_whole",
    ),
    Mutant(
        trap="shards that DeepSpeed's gradient norm does not know for shards",
        file="albert_ds/engine/engine.py",
        fix="        engine, *_ = deepspeed.initialize(",
        without="        for parameter in model.parameters():\n"
        "            parameter.tensor_model_parallel = False\n"
        "        engine, *_ = deepspeed.initialize(",
        test="tests/optim/test_zero.py::test_update_equals_one_process_in_float64[2-2-lamb]",
    ),
    Mutant(
        trap="a gradient that is not contiguous when it reaches a reduction",
        file="albert_ds/parallel/tensor.py",
        fix="copied.register_hook(Tensor.contiguous)",
        without="pass",
        test="tests/test_traps.py::test_a_gradient_that_is_not_contiguous_is_reduced",
    ),
    Mutant(
        trap="LAMB's ratios of the partitions that ZeRO has made",
        file="albert_ds/engine/optimizers.py",
        fix="is_counted=engine.is_counted, reduce=dist.all_reduce)",
        without="is_counted=engine.is_counted)",
        test="tests/optim/test_zero.py::test_update_equals_one_process_in_float64[1-2-lamb]",
    ),
    Mutant(
        trap="the optimizer step that DeepSpeed takes while it is built",
        file="albert_ds/optim/lamb.py",
        fix="        if not self.armed:\n            return\n",
        without="",
        test="tests/test_traps.py::test_building_the_engine_takes_no_hidden_optimizer_step",
    ),
    Mutant(
        trap="states of later parameter groups that DeepSpeed never links",
        file="albert_ds/engine/engine.py",
        fix="    init_states(optimizer, built.fragments, kind.moments, "
        "has_average=average is not None)\n",
        without="",
        test="tests/test_traps.py::test_every_parameter_group_has_its_state_from_the_start",
    ),
    Mutant(
        trap="losses that are means of the micro-batches' means",
        file="albert_ds/training/pretrain.py",
        fix="counted = [getattr(batch.counts, name) for name in PER]",
        without="counted = [\n"
        "        len(batch.micro_batches) * getattr(batch.micro_batches[0], name) for name in PER\n"
        "    ]",
        test="tests/test_global_batch.py::test_any_cut_gives_the_same_update",
    ),
    Mutant(
        trap="a bf16 gradient that is not finite and is applied under ZeRO-2 and 3",
        file="albert_ds/engine/engine.py",
        fix='{"check_grad_overflow": True, **config["bf16"]}',
        without='{"check_grad_overflow": False, **config["bf16"]}',
        test="tests/test_divergence.py::"
        "test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all",
    ),
    Mutant(
        trap="a gradient that is not finite and is applied at ZeRO-0",
        file="albert_ds/engine/engine.py",
        fix='applied = norm < float("inf")',
        without="applied = True",
        test="tests/test_divergence.py::"
        "test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all",
    ),
    Mutant(
        trap="checkpoints of steps that were skipped, which push the good ones out",
        file="albert_ds/training/pretrain.py",
        fix="(is_due and not run.skipped_in_a_row)",
        without="is_due",
        test="tests/test_divergence.py::"
        "test_a_run_that_diverges_ends_with_4_and_names_what_is_good",
    ),
    Mutant(
        trap="a data stream that starts again where a run is resumed",
        file="albert_ds/training/pretrain.py",
        fix="open_stream(config, opened.sources, mesh, begin, device)",
        without="open_stream(config, opened.sources, mesh, 0, device)",
        test="tests/test_layout_change.py::test_no_sample_is_repeated_and_none_is_skipped",
    ),
    Mutant(
        trap="16-bit runs whose master weights start from rounded weights",
        file="albert_ds/engine/engine.py",
        fix="fill_masters(built.fragments, masters)",
        without="pass",
        test="tests/optim/test_zero.py::test_16_bit_runs_start_from_the_fp32_weights[1-2]",
    ),
    Mutant(
        trap="the norm of a long tensor summed in fp32",
        file="albert_ds/optim/norms.py",
        fix="flat[:whole].view(-1, ROW)",
        without="flat[:whole].view(1, -1)",
        test="tests/optim/test_real_sizes.py::"
        "test_the_update_is_that_of_float64_however_a_tensor_is_cut[(4096, 4096)]",
    ),
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--output", type=Path, help="a document with a section `mutants`")
    parser.add_argument("--only", default="", help="mutants whose trap has these words")
    args = parser.parse_args(argv)
    chosen = [mutant for mutant in MUTANTS if args.only in mutant.trap]
    lines = []
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        passed, output = run_tests(tree, sorted({mutant.test for mutant in chosen}))
        assert passed, f"the tests fail with every fix in place:\n{output}"
        print("with every fix: all tests pass", flush=True)
        for mutant in chosen:
            passed, output = try_mutant(tree, mutant)
            survivors += passed
            lines.append(describe(mutant, passed, output))
            print(lines[-1], flush=True)
    if args.output:
        head = ["| without the fix for | its test | and what it says |", "| --- | --- | --- |"]
        replace_section(args.output, "mutants", [*head, *lines])
    return survivors


def copy_tree(folder: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def try_mutant(tree: Path, mutant: Mutant) -> tuple[bool, str]:
    path = tree / mutant.file
    whole = path.read_text(encoding="utf-8")
    assert whole.count(mutant.fix) == 1, f"{mutant.file}: {mutant.fix!r}"
    without = whole.replace(mutant.fix, mutant.without)
    compile(without, mutant.file, "exec")  # a test that fails of a wrong text proves nothing
    path.write_text(without, encoding="utf-8")
    try:
        return run_tests(tree, [mutant.test])
    finally:
        path.write_text(whole, encoding="utf-8")


def run_tests(tree: Path, tests: list[str]) -> tuple[bool, str]:
    """Run them on the tree, not on the installed package; whether all passed, and what was said."""
    done = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode == 0, done.stdout


def describe(mutant: Mutant, passed: bool, output: str) -> str:
    """One row of the table: the trap, the test, how it ended."""
    said = [line[1:].strip() for line in output.splitlines() if re.match(r"E +\S", line)]
    # The last error is that of the rank, inside what the parent raised.
    errors = [at for at, line in enumerate(said) if re.match(r"\w*Error\b", line)]
    first = " ".join(said[errors[-1] : errors[-1] + 2]) if errors else " ".join(said[:1])
    verdict = "PASSED: it holds nothing" if passed else f"failed: `{first[:140].replace('|', '/')}`"
    test = mutant.test.partition("::")
    return f"| {mutant.trap} | `{test[0]}` `{test[2]}` | {verdict} |".replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
