"""What training goes on from: the name of a base, its languages, a tokenizer that differs."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from albert_ds.base.errors import UserError
from albert_ds.base.json_files import read_json
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.vocab.tokenizer_json import list_added_tokens

CARD_BYTES = 1 << 16  # of README.md, which begins with its metadata
CACHED = "models--"  # begins the folder of a model in the cache of huggingface_hub
Languages = Mapping[str, str | None]  # of folders of shards that are open; None: it names none


def describe_start(
    folder: ModelFolder, languages: Languages, *, pair_head: bool = False
) -> list[str]:
    """Lines for who goes on with a model: its ids or its languages are not those of the data.

    pair_head: whether the new run has a sentence head; a line says so if the old one has none.
    """
    lines, added = [], []
    with suppress(UserError):  # a damaged file that is not needed here
        added = [] if folder.is_ours else list_added_tokens(folder.root)
    if added:
        lines.append(
            f"{folder.path}: its tokenizer finds {len(added)} added tokens in a text, such as "
            f"{added[0]!r}; they are ordinary pieces here, so text that has them gets other ids"
        )
    known = find_languages(folder, languages)
    given = {name for name in languages.values() if name}
    if known and given and not known & given:
        was, now = (" ".join(sorted(names)) for names in (known, given))
        lines.append(f"{folder.path}: a model of the language {was}; the shards are of {now}")
    if pair_head and not folder.config.pair_head:
        lines.append(f"{folder.path}: has no sentence head; it starts from --seed")
    return lines


def find_languages(folder: ModelFolder, languages: Languages) -> set[str]:
    """Of the shards of a run of ours, or of Hugging Face's model card; none if none is named."""
    if folder.is_ours and isinstance(shards := folder.record.get("data"), list):
        return read_languages(shards, languages)
    record = folder.record if folder.is_ours else _read_metadata(folder.root / "README.md")
    named = record.get("language")
    named = named if isinstance(named, list) else [named]
    return {name for name in named if isinstance(name, str)}


def read_languages(shards: Iterable[str], languages: Languages) -> set[str]:
    """The languages that folders of shards name, of those that are open or can be read."""
    named = {languages.get(data) for data in shards}
    for data in (data for data in shards if data not in languages):
        with suppress(UserError):
            named.add(read_json(Path(data) / "index.json").get("language"))
    return {name for name in named if isinstance(name, str)}


def find_base(run: dict) -> str | None:
    """The name of the model of Hugging Face from which a run began, perhaps through others."""
    seen: set[str] = set()
    while True:
        start = run.get("checkpoint") or run.get("init_from")
        if run.get("from_scratch") or not isinstance(start, str) or start in seen:
            return None
        seen.add(start)
        root = Path(start)
        try:
            folder = ModelFolder(start)
            if folder.is_ours:
                run = folder.record
                continue
            root = folder.root.resolve()
        except UserError:  # it is gone
            if "checkpoints" in root.parts:
                return None
        cached = (path.name for path in root.parents if path.name.startswith(CACHED))
        return next(cached, root.name).removeprefix(CACHED).replace("--", "/")


def _read_metadata(card: Path) -> dict:
    """What stands between the first two lines of dashes of a README.md."""
    import yaml

    if not card.is_file():
        return {}
    with card.open(encoding="utf-8", errors="replace") as file:
        dashes, _, rest = file.read(CARD_BYTES).partition("\n")
    if dashes.strip() != "---":
        return {}
    with suppress(yaml.YAMLError, ValueError, RecursionError):
        metadata = yaml.safe_load(rest.partition("\n---")[0])
        return metadata if isinstance(metadata, dict) else {}
    return {}
