"""Exported folders to the Hugging Face Hub, as the user who is logged in there.

    albert-ds push --input DIR --repo [USER/]NAME

DIR is what `albert-ds export` wrote: one model, or with --revision-per-checkpoint one folder for
each checkpoint. Each of these becomes the revision of its name (step-00001000), and the newest is
`main` as well. What the Hub has already is not sent again: the same command continues a push that
failed.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from albert_ds import cli
from albert_ds.errors import MachineFailed, UserError

WEIGHTS = "model.safetensors"


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--input", required=True, type=Path, metavar="DIR", help="folder that export wrote")
    add(
        "--repo",
        required=True,
        metavar="[USER/]NAME",
        help="repository to push to, made where it does not exist; USER may be an organisation "
        "(default USER: who is logged in)",
    )
    add("--private", action="store_true", help="make the repository a private one")
    return parser


def list_revisions(folder: Path) -> dict[str, Path]:
    """Revision -> its folder, in the order in which they are pushed: `main` is the last."""
    from albert_ds.checkpoint.folder import list_checkpoints

    steps = list_checkpoints(folder)[::-1] if folder.is_dir() else []
    if (folder / WEIGHTS).is_file() and not steps:
        return {"main": folder}
    if not steps or (folder / WEIGHTS).is_file():
        raise UserError(
            f"--input {folder}: must be a folder that export wrote, with {WEIGHTS} or with folders "
            "step-N, and not both"
        )
    for step in steps:
        if not (step / WEIGHTS).is_file():
            raise UserError(f"--input {folder}: {step.name} has no {WEIGHTS}")
    return {**{step.name: step for step in steps}, "main": steps[-1]}


def push(folder: Path, repo: str, *, private: bool = False) -> str:
    """Upload every revision of an export; returns the address of the repository.

    Raises UserError where nobody is logged in, the package is absent or the Hub refuses; and
    MachineFailed where the connection or the Hub fails, with what was pushed until then.
    """
    cli.require("huggingface_hub", "hf", "push")
    revisions = list_revisions(folder)
    from huggingface_hub import HfApi

    api, done = HfApi(), []
    with _one_line(f"--repo {repo} at {api.endpoint}", done):
        user = api.whoami()["name"]
        name = repo if "/" in repo else f"{user}/{repo}"
        url = api.create_repo(name, exist_ok=True, private=private or None)
        if private and not api.repo_info(url.repo_id).private:
            raise UserError(f"--private: {url} exists and is public")
        for revision, source in revisions.items():
            if revision != "main":
                api.create_branch(url.repo_id, branch=revision, exist_ok=True)
            api.upload_folder(
                repo_id=url.repo_id,
                folder_path=source,
                revision=revision,
                commit_message=f"{source.resolve().name}, exported by albert-ds",
            )
            done.append(revision)
    return url


@contextmanager
def _one_line(where: str, done: list[str]) -> Generator[None]:
    """Errors of the Hub and of the way there, as endings of a command."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError

    try:
        yield
    except UserError:
        raise
    except LocalTokenNotFoundError:
        raise UserError(f"{where}: not logged in: type hf auth login") from None
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status == 401:
            raise UserError(f"{where}: not logged in: type hf auth login ({error})") from None
        if status in (400, 403) or isinstance(error, ValueError):
            raise UserError(f"{where}: {error}") from None
        raise MachineFailed(
            f"{where}: {error.__cause__ or error}; pushed until then: "
            f"{', '.join(done) or 'nothing'}; the same command continues"
        ) from error


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    url = push(args.input, args.repo, private=args.private)
    card = list_revisions(args.input)["main"] / "README.md"
    if card.is_file() and "FILL IN" in card.read_text(encoding="utf-8"):
        cli.log_line(f"{card}: has places marked FILL IN; fill them in and push again")
    print(f"pushed {args.input} to {url}: {', '.join(list_revisions(args.input))}")
