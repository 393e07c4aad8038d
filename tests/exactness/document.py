"""Write tables into a document, between marks, by the command that measured them."""

from pathlib import Path


def replace_section(path: Path, name: str, lines: list[str]) -> None:
    """Put `lines` between `<!-- name -->` and `<!-- end of name -->`, which must be there."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    head, found_begin, rest = path.read_text(encoding="utf-8").partition(begin)
    _, found_end, tail = rest.partition(end)
    assert found_begin and found_end, f"{path} has no section {name}"
    body = "\n".join(lines)
    path.write_text(f"{head}{begin}\n{body}\n{end}{tail}", encoding="utf-8")
