"""The tested range of versions: one table, which the bounds of pyproject.toml and the pins agree with."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def ran(command: str) -> tuple[int, str]:
    """Status of a script of .ci/, and what it says."""
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_bounds_and_pins_are_those_that_were_tested():
    status, text = ran(".ci/versions list")
    assert status == 0, text
    assert {"torch", "transformers", "accelerate"} <= {line.split()[0] for line in text.splitlines()}


def test_a_library_whose_internals_are_used_is_bounded_at_the_minor_version_that_was_tested():
    """So that a fresh install without the pins cannot take a version in which they differ."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "datasets"):
        (bound,) = (word for word in dependencies if re.match(rf"{name}\b", word))
        assert re.search(r",<\d+\.\d+", bound), bound


def test_the_lock_has_the_pins_with_hashes_and_names_no_index():
    status, text = ran(".ci/lock check")
    assert status == 0, text
    lock = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"://|--(?!hash=sha256:)|^torch==|@ ", lock, re.MULTILINE)
