"""What pyproject.toml cannot say: the README as the package's page shows it, outside a clone."""

import re
from pathlib import Path

from setuptools import setup

try:
    import tomllib
except ImportError:  # Python 3.10
    from setuptools.compat.py310 import tomllib


def read_readme() -> str:
    """README.md, whose links to files of a clone lead to Source; without one their text stays."""
    readme, package, settings = (
        Path(name).read_text("utf-8")
        for name in ("README.md", "albert_ds/__init__.py", "pyproject.toml")
    )
    source = tomllib.loads(settings)["project"]["urls"].get("Source")
    version = re.search(r'__version__ = "(.+)"', package)[1]
    link = rf"[\1]({source}/blob/v{version}/\2)" if source else r"\1"
    return re.sub(r"\[([^\]]+)\]\((?!https://)([^)]+)\)", link, readme)


setup(long_description=read_readme(), long_description_content_type="text/markdown")
