"""Compare the installed libraries with the range that the kit was tested with: the table of docs/versions.md."""

import platform
import re

from kit.config.recipe import REINSTALL, ROOT
from kit.run.record import versions
from kit.tools.doctor.result import Result, ok

_TABLE = ROOT / "docs/versions.md"
_ROW = re.compile(r"^\| ([\w.-]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def read_table() -> dict[str, tuple[str, str]]:
    """Return the oldest and the newest tested version of each library. Empty where the kit lies without that file."""
    try:
        text = _TABLE.read_text(encoding="utf-8")
    except OSError:
        return {}
    return {name: (oldest, newest) for name, oldest, newest in _ROW.findall(text)}


def check_versions() -> Result:
    """Fail for a library that is absent or older than tested; warn for one that is newer."""
    installed, table = versions(), read_table()
    shown = [f"{name} {version}" for name, version in installed.items() if name in table and version]
    found = ", ".join([f"Python {platform.python_version()}", *shown])
    if not table:
        return Result("versions", "warn", f"{found}; docs/versions.md is not there to compare", REINSTALL)
    old, new = [], []
    for name, (oldest, newest) in table.items():
        if name not in installed:
            continue  # not at work in a run
        version = installed[name]
        if version is None or _number(version) < _number(oldest):
            old.append(f"{name} {version or 'not installed'} (tested {oldest} to {newest})")
        elif _number(version) > _number(newest):
            new.append(f"{name} {version} (tested {oldest} to {newest})")
    fix = f"{REINSTALL} takes the tested versions"
    if old:
        return Result("versions", "fail", ", ".join(old + new), fix)
    if new:
        return Result("versions", "warn", f"newer than tested: {', '.join(new)}", fix)
    return ok("versions", found)


def _number(version: str) -> tuple[int, ...]:
    """Numbers to compare by, without a suffix such as ``+cu128``; 5.0.0 is 5."""
    parts = [int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version)[0])]
    while len(parts) > 1 and not parts[-1]:
        parts.pop()
    return tuple(parts)
