"""Write DeepSpeed's JSON files, flags of a small model and recipes for Slurm to a folder, to edit.

Writes DIR/ds_configs, DIR/recipes and DIR/slurm. A file that is there already and differs is never
replaced.
"""

from pathlib import Path

from albert_ds.base import cli
from albert_ds.base.files import PACKAGE, check_folder, new_folder

FILES = ("ds_configs/*.json", "ds_configs/README.md", "recipes/*.yaml", "slurm/*.sh")
FILES += ("slurm/site.env.example",)
NEED_A_CLONE = {"slurm/check.sh"}  # it runs the project's tests


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__)
    parser.add("--output", "folder to write to; is made", "DIR", Path, required=True)
    return parser


def main(argv: list[str]) -> None:
    output = build_parser().parse_args(argv).output
    recipes = [path.relative_to(PACKAGE) for files in FILES for path in PACKAGE.glob(files)]
    names = sorted(name for name in recipes if name.as_posix() not in NEED_A_CLONE)
    check_folder(output, names=())
    with new_folder(output) as partial:
        for name in names:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).write_bytes((PACKAGE / name).read_bytes())
    print(f"{output}: {len(names)} files in ds_configs/, recipes/ and slurm/")
