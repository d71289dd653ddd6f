"""Versions are compared with the table that .ci/versions tests."""

import runpy

import pytest
from helpers import ROOT

from kit.tools.doctor import versions
from kit.tools.doctor.versions import check_versions, read_table


def test_the_table_is_the_one_that_is_tested():
    tested = runpy.run_path(str(ROOT / ".ci/versions"))["read_table"]()
    assert read_table() == {name: (row["oldest"], row["newest"]) for name, row in tested.items()}


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.11.9", "fail"),
        ("2.12.0+cu130", "ok"),
        ("2.14.1", "ok"),
        ("2.14.2rc1", "warn"),
        ("2.9", "fail"),
        (None, "fail"),
    ],
)
def test_a_version_outside_the_range_is_named_with_the_range(version, status, monkeypatch):
    monkeypatch.setattr(versions, "read_table", lambda: {"torch": ("2.12.0", "2.14.1"), "pytest": ("8", "9")})
    monkeypatch.setattr(versions, "versions", lambda: {"kit": "0", "torch": version})
    result = check_versions()
    assert result.status == status
    if status != "ok":
        assert f"torch {version or 'not installed'} (tested 2.12.0 to 2.14.1)" in result.found
        assert "constraints.txt" in result.fix


def test_a_kit_without_its_docs_says_that_nothing_was_compared(monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "_TABLE", tmp_path / "versions.md")
    assert check_versions().status == "warn"


def test_the_versions_of_this_machine_are_in_the_range():
    assert check_versions().status == "ok"
