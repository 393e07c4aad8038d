"""Whether the wheels of a folder and the GPU machine's own packages are all that is needed there.

python check_wheels.py FOLDER on_device.txt pyproject.toml
"""

import re
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

GPU_MACHINE = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
KIT = ["psutil", "pytest", "pytest-timeout", "transformers"]


def read_wheel(path: Path) -> tuple[str, list[str]]:
    """A wheel's name and what it requires."""
    with zipfile.ZipFile(path) as wheel:
        file = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        facts = Parser().parsestr(wheel.read(file).decode())
    return canonicalize_name(facts["Name"]), facts.get_all("Requires-Dist", [])


def main(folder: str, packages: str, project: str) -> None:
    wheels = [read_wheel(path) for path in sorted(Path(folder).glob("*.whl"))]
    carried = {name for name, _ in wheels}
    if len(carried) < len(wheels):
        sys.exit(f"{folder}: two versions of one package; pip would stop at them")
    listed = re.sub("#.*", "", Path(packages).read_text())
    there = set(map(canonicalize_name, listed.split()))
    dependencies = Path(project).read_text().partition("\ndependencies = [")[2].partition("\n]")[0]
    wheels += [("the project", re.findall(r'^    "(.+)",$', dependencies, re.M)), ("the kit", KIT)]
    missing = set()
    for owner, needs in wheels:
        for need in map(Requirement, needs):
            name = canonicalize_name(need.name)
            wanted = need.marker is None or need.marker.evaluate(GPU_MACHINE)
            if wanted and name not in carried | there:
                missing.add(f"{name} (for {owner})")
    print("carried:", ", ".join(sorted(carried)))
    if missing:
        sys.exit(f"missing on the GPU machine: {', '.join(sorted(missing))}")
    if superfluous := carried & there:
        sys.exit(f"carried for nothing: {', '.join(sorted(superfluous))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
