"""The tested range of versions: one table, which the bounds of pyproject.toml and the pins agree with."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = (".ci/versions", ".ci/lock", "docs/versions.md", "pyproject.toml", "constraints.txt", "requirements.lock")


@pytest.fixture
def project(tmp_path):
    """A copy of what is compared."""
    for file in FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def compare(folder: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, folder / ".ci/versions", "list"], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_bounds_and_pins_are_those_that_were_tested():
    status, text = compare(ROOT)
    assert status == 0, text
    assert {"torch", "transformers", "accelerate"} <= {line.split()[0] for line in text.splitlines()}


def test_a_library_whose_internals_are_used_is_bounded_at_the_minor_version_that_was_tested():
    """So that a fresh install without the pins cannot take a version in which they differ."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "datasets"):
        (bound,) = (word for word in dependencies if re.match(rf"{name}\b", word))
        assert re.search(r",<\d+\.\d+", bound), bound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "pattern", "put", "said"),
    [
        ("pyproject.toml", r"torch>=[\d.]+", "torch>=2.1", "torch: pyproject.toml allows from 2.1,"),
        ("pyproject.toml", r"peft>=[\d.]+,<[\d.]+", "peft", "peft: in the table, without a lower bound"),
        ("constraints.txt", r"torch==[\d.]+", "torch==2.99.0", "torch: constraints.txt pins 2.99.0,"),
        ("docs/versions.md", r"\| torch \| [\d.]+", "| torch | 2.13.0", "tested from 2.13.0"),
    ],
)
def test_a_bound_or_a_pin_that_was_not_tested_is_reported(project, file, pattern, put, said):
    text, count = re.subn(pattern, put, (project / file).read_text(), count=1)
    assert count
    (project / file).write_text(text)
    status, told = compare(project)
    assert status == 1 and said in told, told


def test_a_word_that_is_no_end_of_the_range_is_answered_with_the_usage():
    done = subprocess.run([sys.executable, ROOT / ".ci/versions", "middle"], capture_output=True, text=True)
    assert done.returncode == 2 and "versions list" in done.stderr


# requirements.lock


def check_lock(folder: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, folder / ".ci/lock", "check"], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_the_lock_has_the_pins_with_hashes_and_names_no_index():
    status, text = check_lock(ROOT)
    assert status == 0, text
    lock = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"://|--(?!hash=sha256:)|^torch==|@ ", lock, re.MULTILINE)


@pytest.mark.parametrize(
    ("file", "pattern", "put", "reported"),
    [
        ("constraints.txt", r"xxhash==[\d.]+", "xxhash==9.9", "xxhash: constraints.txt pins 9.9, requirements.lock"),
        ("constraints.txt", r"\Z", "newlib==1.0\n", "newlib: constraints.txt pins 1.0, requirements.lock nothing"),
        ("requirements.lock", r"(xxhash==[\d.]+) \\\n(    --hash.*\n)+", r"\1 \\\n", "xxhash==4.1.0: no hash in"),
        ("requirements.lock", r"absl-py==", "--index-url https://mirror\nabsl-py==", "no pin and no hash: --index-url"),
    ],
)
def test_a_lock_that_disagrees_with_the_pins_is_reported(project, file, pattern, put, reported):
    text, count = re.subn(pattern, put, (project / file).read_text(), count=1)
    assert count
    (project / file).write_text(text)
    status, found = check_lock(project)
    assert status == 1 and reported in found and "write it again: .ci/lock" in found, found


# .ci/publish


@pytest.mark.parametrize(
    ("heading", "dirty", "reported"),
    [
        ("unreleased", False, "CHANGELOG.md: no heading '## [{version}] - YYYY-MM-DD'"),
        ("2026-12-01", True, "changes that are not committed"),
        ("2026-12-01", False, "the tag v{version} exists"),
    ],
)
def test_a_release_is_refused_before_anything_is_built(tmp_path, heading, dirty, reported):
    for file in (".ci/publish", "pyproject.toml", "kit/__init__.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    version = re.findall(r'__version__ = "(.+)"', (ROOT / "kit/__init__.py").read_text())[0]
    (tmp_path / "CHANGELOG.md").write_text(f"## [{version}] - {heading}\n")
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*name, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    if dirty:
        (tmp_path / "new.txt").touch()
    if not dirty and heading != "unreleased":
        subprocess.run(["git", "tag", f"v{version}"], cwd=tmp_path, check=True)
    done = subprocess.run([sys.executable, tmp_path / ".ci/publish"], capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and reported.format(version=version) in line
    assert not (tmp_path / "dist").exists()
