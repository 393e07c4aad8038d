"""Which room of albert_ds imports which: `python -m tests.rooms` prints the diagram of the page."""

from tests.test_layers import IMPORTS, package_of


def draw() -> str:
    """A flowchart without the arrows that follow from others."""
    lines = ["flowchart TD"]
    for room, imported in sorted(find_imports().items()):
        implied = {far for near in imported for far in reach(near)}
        lines += [f"    {room} --> {lower}" for lower in sorted(imported - implied)]
        lines += [] if imported else [f"    {room}"]
    return "\n".join(lines) + "\n"


def find_imports() -> dict[str, set[str]]:
    """The rooms that each room imports; without the entry, which imports all."""
    imports: dict[str, set[str]] = {}
    for module, imported in IMPORTS.items():
        imports.setdefault(package_of(module), set()).update(map(package_of, imported))
    return {room: imports[room] - {room} for room in imports if room not in ("__main__", "base")}


def reach(room: str) -> set[str]:
    """All rooms that a room imports, itself or through others."""
    direct = find_imports().get(room, set())
    return direct.union(*map(reach, direct))


if __name__ == "__main__":
    print(draw(), end="")
