"""Containerfile: its paths exist, and what it builds from is all that the build needs."""

import json
import re
import tomllib
from fnmatch import fnmatch

from helpers import ROOT

TEXT = (ROOT / "Containerfile").read_text()
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]


def instructions():
    """(instruction, arguments) of the file, with continued lines joined."""
    lines = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))
    for line in re.sub(r"\\\n", " ", lines).splitlines():
        if line.strip():
            yield line.split(None, 1)


def values(name):
    return [arguments for instruction, arguments in instructions() if instruction == name]


def is_ignored(path):
    return any(fnmatch(path.split("/")[0], pattern.removeprefix("**/")) for pattern in IGNORED)


def test_what_is_copied_and_what_the_wheel_is_made_of_exists_and_is_not_ignored():
    copied = [name for arguments in values("COPY") for name in arguments.split()[:-1]]
    assert "." in copied and "constraints.txt" in copied
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for name in [*copied, *project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"], "README.md"]:
        assert (ROOT / name).exists() and not is_ignored(name)


def test_it_installs_from_the_lock():
    assert any("--require-hashes" in command and "requirements.lock" in command for command in values("RUN"))


def test_it_starts_the_command_of_the_package_and_not_as_root():
    (entry,), (command,) = (list(map(json.loads, values(name))) for name in ("ENTRYPOINT", "CMD"))
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert entry[0] in scripts and command == ["train"]
    assert values("USER") and values("USER")[-1].split(":")[0] not in ("root", "0")
    assert [name for name, _ in instructions()].index("USER") > [name for name, _ in instructions()].index("COPY")
