"""Fixes of the command line, of recipe files and of settings that do not fit together."""

from fixes.harness import case

UNTYPED: dict[str, str] = {}


@case("kit/config/validation.py:_unknown#3")
def a_flag_with_a_slip(world):
    return "finetune --learning_rte 1e-4"


@case("kit/config/validation.py:validate#2")
def a_rate_without_its_minus(world):
    return "finetune --learning_rate 2e5"


@case("kit/config/conflicts.py:_conflicts_of_batch")
def a_batch_that_is_not_divisible(world):
    return "finetune --global_batch_size 30 --per_device_train_batch_size 4"
