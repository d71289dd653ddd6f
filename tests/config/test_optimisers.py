"""The setting lists the optimisers of the table; those of other kits are refused by name, with what to use."""

import re

from transformers.training_args import OptimizerNames

from kit.config.command_line import read_command_line
from kit.config.hints import hint_for_value
from kit.config.optimisers import OPTIMISERS, OTHER_NAMES

THEIRS = "muonclip lion_pytorch galore_adamw_8bit q_galore adam_mini came_pytorch optimi_adamw ao_adamw_4bit".split()


def test_each_optimiser_of_transformers_is_offered_or_named_with_what_to_use():
    for name in sorted({each.value for each in OptimizerNames} | {*THEIRS, *OTHER_NAMES}):
        answer = hint_for_value("optim", name)
        assert (name in OPTIMISERS) != bool(answer), name
        if answer:
            assert set(re.findall(r"\w*(?:adamw|lion)_\w+", answer)) <= set(OPTIMISERS) and "use " in answer, name


def test_a_lion_has_no_default_rate_and_does_not_take_a_recipes_for_adamw(tmp_path):
    file = tmp_path / "mine.yaml"
    for text in ("", "learning_rate: 1e-4\n"):
        file.write_text(f"model_name_or_path: m\ndataset: x.jsonl\n{text}")
        words = ["--recipe", str(file), "--optim", "lion_32bit"]
        (problem,) = read_command_line(words).problems
        assert problem.where.endswith("learning_rate") and "below AdamW's" in problem.fix
        assert not read_command_line([*words, "--learning_rate", "1e-4"]).problems
    file.write_text(file.read_text() + "optim: lion_8bit\n")
    assert not read_command_line(words).problems  # the file's rate is for lion
