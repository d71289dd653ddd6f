"""A failing script explains itself: out of memory with its contents, lost ranks by name."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
from helpers import ROOT, run_ranks
from memory_helpers import ON_CPU, make, placed

from kit.failures import exits
from kit.failures.guard import Guard
from kit.memory import out_of_memory
from kit.system import phases
from kit.system.errors import UserError


@pytest.fixture
def guard(monkeypatch):
    """A guard of one process; what it has to explain is forgotten after the test."""
    monkeypatch.setattr(exits, "_explainers", list(exits._explainers))
    explain = partial(out_of_memory.explain, recipe=make(method="full"), topology=placed())
    return Guard(SimpleNamespace(process_index=0, num_processes=1), 60, explain)


def explained(error):
    """As the script explains it when it ends."""
    return next((text for explain in exits._explainers if (text := explain(error))), None)


def test_out_of_memory_is_explained_with_the_memory_of_the_run(guard, build):
    before = explained(RuntimeError(ON_CPU))
    assert isinstance(before, UserError) and "trainable weights" not in str(before)
    model, optimizer = build()
    guard.set_model(model)
    assert re.search(r"^ +trainable weights +[1-9]", str(explained(RuntimeError(ON_CPU))), re.M)
    model(input_ids=model.model.embed_tokens.weight.new_ones(1, 4).long()).logits.sum().backward()
    optimizer.step()
    assert "optimiser state" not in str(explained(RuntimeError(ON_CPU)))
    guard.set_model(model, optimizer)
    assert re.search(r"^ +optimiser +[1-9]", str(explained(RuntimeError(ON_CPU))), re.M)


def test_other_errors_are_not_explained(guard):
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError("out of memory")):
        assert explained(error) is None


def test_a_phase_and_each_item_of_an_evaluation_count_as_progress(guard):
    """Or an evaluation that takes longer than the time-out would be taken for a rank that hangs."""
    guard._last_progress = 0.0
    guard.enter(phases.EVALUATING, 4)
    assert guard._last_progress > 0 and (guard.phase, guard._step) == (phases.EVALUATING, 4)
    moves = []
    for item in guard.progress([1, 2, 3], "evaluation loss", 3):
        moves.append((item, guard._last_progress > 0))
        guard._last_progress = 0.0
    assert moves == [(1, True), (2, True), (3, True)]


SHORT = """
import runpy, sys
import torch
from transformers.models.llama.modeling_llama import LlamaMLP
from kit.train import step

train_step, plain, num_steps = step.train_step, LlamaMLP.forward, 0
def counted(*args, **kwargs):
    global num_steps
    num_steps += 1
    return train_step(*args, **kwargs)
def forward(self, hidden):
    return plain(self, hidden) if num_steps < 3 else torch.empty(1 << 50)
step.train_step, LlamaMLP.forward = counted, forward
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_the_script_ends_with_the_message_and_the_flag_in_it_works(finetune, tmp_path):
    """Status 2 and no traceback; nothing is lost."""
    (tmp_path / "short.py").write_text(SHORT.format(script=str(ROOT / "recipes/finetune.py")))
    flags = {"per_device_train_batch_size": 8, "method": "full", "save_steps": 1}
    words = [f"--{name}={value}" for name, value in (finetune.defaults | flags).items()]
    run_ranks(str(tmp_path / "short"), [*words, f"--output_dir={tmp_path / 'run'}"], 1, log := tmp_path / "log.txt")
    text = log.read_text()
    assert log.with_suffix(".status").read_text() == "2" and "Traceback" not in text, text
    assert "\nerror: out of memory: in the forward pass\n" in text
    assert re.search(r"^ +trainable weights +[1-9]", text, re.M) and re.search(r"^ +optimiser +[1-9]", text, re.M)
    assert "\n        --per_device_train_batch_size 1 " in text
    went_on = finetune.ok("run", **flags | {"per_device_train_batch_size": 1})
    assert "continuing after step 2 of 6" in went_on.output
