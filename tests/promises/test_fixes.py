"""Every fix that a message prints works when it is typed."""

import importlib
from pathlib import Path

import pytest
from fixes.harness import CASES, World, all_sites

FILES = sorted((Path(__file__).parents[1] / "fixes").glob("cases_*.py"))
MODULES = [importlib.import_module(f"fixes.{path.stem}") for path in FILES]
UNTYPED = {site: reason for module in MODULES for site, reason in module.UNTYPED.items()}


@pytest.fixture
def world(tmp_path, monkeypatch, model_folder, chat_file):
    (tmp_path / "model").symlink_to(model_folder)
    (tmp_path / "chats.jsonl").symlink_to(chat_file)
    monkeypatch.chdir(tmp_path)
    return World(tmp_path, monkeypatch)


@pytest.mark.parametrize("case", [pytest.param(case, id=f"{case.site} {case.make.__name__}") for case in CASES])
def test_a_fix_works_when_it_is_typed(case, world):
    case.try_fix(world)


def test_every_case_and_every_reason_has_its_fix():
    tried = {case.site for case in CASES}
    gone = sorted((tried | set(UNTYPED)) - set(all_sites()))
    assert not gone, f"no such site any more: {gone}"
    assert not tried & set(UNTYPED), f"tried, so it needs no reason: {sorted(tried & set(UNTYPED))}"
