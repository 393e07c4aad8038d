"""albert-ds: `__version__`, and what docs/python.md shows. Everything else may change."""

__version__ = "0.1.0"
