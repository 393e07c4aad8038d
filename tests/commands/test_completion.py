"""What a shell completes."""

import subprocess

import pytest

from tests.command import run_command

TRY = """F=$(complete -p albert-ds | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); $F albert-ds "${@: -1}" "${@: -2:1}"
echo "${COMPREPLY[@]}"
"""


def test_bash_completes_commands_flags_and_choices():
    pytest.importorskip("shtab")
    script = run_command("completion", "bash").out
    for words, expected in (
        (("albert-ds", "tr"), "train traffic"),
        (("albert-ds", "train", "--micro"), "--micro-batch-size"),
        (("albert-ds", "train", "--model", "albert-x"), "albert-xlarge albert-xxlarge"),
        (("albert-ds", "export", "--max"), "--max-length"),
    ):
        done = subprocess.run(
            ["bash", "-c", script + TRY, "bash", *words], capture_output=True, text=True
        )
        assert done.stdout.split() == expected.split(), done.stderr
