"""Tables of what a user brings and what happens then, whose rows tests run."""

import re

from tests.command import ROOT, Done


def read_rows(page: str, heading: str) -> dict[str, str]:
    """What is brought -> what the page promises, of the table in a section."""
    section = (ROOT / "docs" / page).read_text().partition(f"## {heading}\n")[2]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section.partition("\n## ")[0], re.MULTILINE)
    return dict(rows[2:])


def keep(promise: str, done: Done, *, code: int | None = None) -> None:
    """Assert that a command ended as promised and said all that is quoted; if refused, last."""
    done = Done(*done)
    is_refused = promise.startswith("refused")
    assert done.code == (code if code is not None else 2 * is_refused), done
    said = done.err.splitlines()[-1] if is_refused else done.out + done.err
    for quoted in re.findall("`(.+?)`", promise):
        assert quoted in said, done
    assert "Traceback" not in done.err, done
