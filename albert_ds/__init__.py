"""albert-ds: `__version__`, and what docs/python.md shows. Everything else may change."""


def __getattr__(name: str) -> str:
    # importlib.metadata takes a while to import.
    if name == "__version__":
        from importlib.metadata import version

        return version("albert-ds")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
