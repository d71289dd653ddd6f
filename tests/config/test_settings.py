"""What follows from settings: what each objective declares, rates, references, and what identifies a run."""

import re
from pkgutil import resolve_name

from helpers import ROOT

from kit.config.recipe import IDENTITY, Recipe
from kit.config.settings.objective import DECLARED, ObjectiveSettings
from kit.data.kinds.kinds import KINDS
from kit.schema.fields import choices
from kit.tasks.base import Objective

PAGE = ROOT / "docs/sft-and-preferences.md"


def recipe(**settings):
    return Recipe(model_name_or_path="m", dataset="d", **settings)


def test_what_is_declared_of_objectives_covers_each_objective_and_each_of_their_settings():
    assert list(DECLARED) == choices(Recipe.model_fields["objective"].annotation)
    used = {name for declared in DECLARED.values() for name in declared.settings}
    assert used == set(ObjectiveSettings.model_fields) - {"objective"}
    for name, declared in DECLARED.items():
        assert issubclass(resolve_name(declared.loss), Objective)
        assert (declared.beta is not None) == ("beta" in declared.settings)
        assert recipe(objective=name).reward_scale == (declared.beta or 0)
    assert recipe(objective="dpo", beta=0.5).reward_scale == 0.5


def test_a_sample_has_a_sequence_for_each_of_its_answers():
    for declared in DECLARED.values():
        if answers := KINDS[declared.rows].answers:
            assert declared.sequences_per_sample == len(answers)


def test_the_default_rate_follows_the_objective_and_the_method():
    for name in DECLARED:
        full, adapters = DECLARED[name].learning_rates
        rates = [recipe(objective=name, method=method).peak_learning_rate for method in ("full", "lora", "qlora")]
        assert rates == [full, adapters, adapters] and full < adapters, name
        assert recipe(objective=name, learning_rate=1e-3).peak_learning_rate == 1e-3, name


def test_the_page_of_objectives_has_their_defaults():
    rows = re.findall(r"^\|[^|]+\| `(\w+)` \| (yes|no) \|([^|]*)\| (\S+) / (\S+) \|$", PAGE.read_text(), re.MULTILINE)
    assert [name for name, *_ in rows] == list(DECLARED)
    for name, has_reference, beta, full, adapters in rows:
        declared = DECLARED[name]
        assert (has_reference == "yes", float(full), float(adapters)) == (
            declared.has_reference,
            *declared.learning_rates,
        )
        assert beta.partition(",")[0].strip() == (f"{declared.beta:g}" if declared.beta else "")
        for setting, value in re.findall(r"`(\w+)` (\S+)", beta):
            assert Recipe.model_fields[setting].default == float(value)


def test_the_reference_is_computed_beforehand_where_its_weights_do_not_stay():
    cases = [
        ({"objective": "dpo"}, False),
        ({"objective": "dpo", "precompute_reference": True}, True),
        ({"objective": "dpo", "method": "full"}, True),
        ({"objective": "kto", "adapter_name_or_path": "a"}, True),
        ({"objective": "simpo", "method": "full"}, False),
        ({"method": "full"}, False),
    ]
    for settings, expected in cases:
        assert recipe(**settings).precomputes_reference == expected, (settings, expected)


def test_what_changes_the_steps_identifies_a_run_and_what_only_watches_them_does_not():
    assert {"seed", "learning_rate", "packing", "lora_r", "model_name_or_path"} <= set(IDENTITY)
    assert not {"logging_steps", "output_dir", "eval_steps", "per_device_train_batch_size"} & set(IDENTITY)
