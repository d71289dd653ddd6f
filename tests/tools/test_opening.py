"""A model is opened to answer in one process, and only what has a base is opened beside it."""

import pytest

from kit.config.command_line import read_command_line
from kit.errors import UserError
from kit.tools.opening import open_models, plan_one_process


@pytest.fixture
def request_of(model_folder, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def request_of(*words):
        words = [f"--model_name_or_path={model_folder}", *words]
        return read_command_line(words, {"model_name_or_path": "dataset"}, trains=False)

    return request_of


def test_several_processes_are_refused(request_of):
    with pytest.raises(UserError, match="expected one process") as caught:
        plan_one_process(request_of("--config=ddp"))
    assert caught.value.problems[0].fix == "--config single"


def test_a_whole_model_outside_of_a_run_has_no_base(request_of):
    recipe, topology = plan_one_process(request_of())
    with pytest.raises(UserError, match="not in the folder of a run"):
        next(open_models(recipe, topology, is_plain=True, with_base=True))


def test_a_missing_template_is_found_before_weights_are_read(request_of, monkeypatch):
    recipe, topology = plan_one_process(request_of())
    monkeypatch.setattr("kit.tools.opening.build_model", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr("kit.tools.opening.resolve_template", lambda *_: None)
    with pytest.raises(UserError, match="brings none; expected a chat template"):
        next(open_models(recipe, topology, is_plain=False, with_base=False))
