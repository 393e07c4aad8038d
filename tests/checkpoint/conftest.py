"""The vocabulary of tests/interop."""

from tests.interop.conftest import vocab  # noqa: F401
