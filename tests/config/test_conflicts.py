"""Settings that are right alone and wrong together are named, with one that works."""

import pytest

from kit.config.conflicts import describe_unused, find_conflicts, fix_of_batch
from kit.config.recipe import Recipe

REQUIRED = {"model_name_or_path": "m", "dataset": "d"}


def test_settings_that_contradict_each_other_are_named():
    cases = [
        ({"global_batch_size": 10, "per_device_train_batch_size": 4}, {"global_batch_size"}),
        ({"eval_dataset": "e", "eval_split_size": 0.1}, {"eval_split_size"}),
        ({"eval_steps": 5}, {"eval_steps"}),
        ({"predict_with_generate": True}, {"predict_with_generate"}),
        ({"method": "full", "adapter_name_or_path": "a"}, {"adapter_name_or_path"}),
        ({"method": "qlora", "use_dora": True}, {"use_dora"}),
        ({"init_lora_weights": "orthogonal", "lora_r": 3}, {"init_lora_weights"}),
        ({"init_lora_weights": "orthogonal", "objective": "dpo"}, {"init_lora_weights"}),
        ({"init_lora_weights": "orthogonal", "objective": "orpo"}, set()),
        ({"init_lora_weights": "orthogonal", "objective": "kto", "adapter_name_or_path": "a"}, set()),
        ({"eval_steps": 5, "use_dora": True, "method": "qlora"}, {"eval_steps", "use_dora"}),
        ({"eval_steps": 5, "eval_split_size": 0.1}, set()),
        ({"save_strategy": "steps"}, {"save_strategy"}),
        ({"save_strategy": "epoch", "save_steps": 5}, {"save_strategy"}),
        ({"eval_strategy": "no", "eval_steps": 5, "eval_dataset": "e"}, {"eval_strategy"}),
        ({"eval_strategy": "epoch"}, {"eval_strategy"}),
        ({"streaming": True, "max_steps": 3, "save_strategy": "epoch"}, {"streaming"}),
        ({"streaming": True, "max_steps": 3, "max_train_samples": 9}, {"streaming"}),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, {"lr_scheduler_type"}),
        ({"lr_scheduler_type": "warmup_stable_decay", "min_lr_rate": 0.1}, {"lr_scheduler_type"}),
        ({"min_lr_rate": 0.1, "lr_decay_steps": 0.1}, {"min_lr_rate", "lr_decay_steps"}),
        ({"lr_scheduler_type": "cosine_with_min_lr", "min_lr_rate": 0, "lr_decay_steps": 9}, {"lr_decay_steps"}),
        ({"lr_scheduler_type": "warmup_stable_decay", "lr_decay_steps": 9, "min_lr_rate": 0.1}, set()),
        ({"early_stopping_patience": 2}, {"early_stopping_patience"}),
        ({"early_stopping_patience": 2, "eval_dataset": "e"}, {"early_stopping_patience"}),
        ({"early_stopping_threshold": 0.1}, {"early_stopping_threshold"}),
        ({"early_stopping_patience": 2, "eval_dataset": "e", "eval_strategy": "epoch"}, set()),
        ({"method": "full", "freeze": "a*", "train_only": "b*"}, {"train_only"}),
        ({"train_only": "b*"}, {"train_only"}),
        ({"method": "full", "freeze": "a*,b*"}, set()),
        ({"eval_strategy": "no", "save_strategy": "no"}, set()),
        ({"eval_strategy": "steps", "eval_steps": 5, "eval_dataset": "e", "save_strategy": "epoch"}, set()),
        ({"eval_steps": 5, "eval_dataset": "e"}, set()),
        ({"new_tokens": "<a>", "adapter_name_or_path": "a"}, {"new_tokens"}),
        ({"lora_modules_to_save": "lm_head", "adapter_name_or_path": "a"}, {"lora_modules_to_save"}),
        ({"new_tokens": "<a>", "trainable_tokens": "<b>", "method": "full"}, set()),
        ({"beta": 0.1}, {"beta"}),
        ({"objective": "dft", "label_smoothing_factor": 0.1}, {"label_smoothing_factor"}),
        ({"objective": "dpo", "beta": 0.2, "dpo_loss": "ipo", "precompute_reference": True}, set()),
        ({"objective": "dpo", "label_smoothing_factor": 0.1}, {"label_smoothing_factor"}),
        ({"objective": "dpo", "simpo_gamma": 1, "cpo_alpha": 0}, {"simpo_gamma", "cpo_alpha"}),
        ({"objective": "simpo", "precompute_reference": True}, {"precompute_reference"}),
        ({"objective": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 1}, set()),  # the defaults
        ({"objective": "orpo", "dpo_loss": "hinge"}, {"dpo_loss"}),
        ({"objective": "kto", "desirable_weight": 2, "undesirable_weight": 2}, set()),
        ({"objective": "cpo", "desirable_weight": 2}, {"desirable_weight"}),
        ({"objective": "dpo", "dpo_loss": "ipo", "label_smoothing": 0.1}, {"label_smoothing"}),
        ({"objective": "dpo", "dpo_loss": "hinge", "label_smoothing": 0.1}, {"label_smoothing"}),
        ({"objective": "dpo", "dpo_loss": "robust"}, {"dpo_loss"}),
        ({"objective": "dpo", "dpo_loss": "robust", "label_smoothing": 0.1}, set()),
        ({"objective": "dpo", "dpo_loss": "sigmoid_norm", "label_smoothing": 0.1}, set()),
        ({"metric_for_best_model": "eval_rewards/margins"}, {"metric_for_best_model"}),
        ({"objective": "kto", "metric_for_best_model": "eval_rewards/accuracies"}, {"metric_for_best_model"}),
        ({"objective": "kto", "metric_for_best_model": "eval_rewards/margins"}, set()),
        ({"objective": "orpo", "metric_for_best_model": "eval_rewards/accuracies"}, set()),
        ({"objective": "dpo", "train_on": "all"}, {"train_on"}),
        ({"objective": "dft", "train_on": "all", "excess_length_strategy": "split"}, set()),
        ({"objective": "cpo", "excess_length_strategy": "split"}, {"excess_length_strategy"}),
        ({"objective": "kto", "streaming": True, "max_steps": 3}, {"streaming"}),
        ({"objective": "dpo", "streaming": True, "max_steps": 3}, set()),
        ({"objective": "dpo", "streaming": True, "max_steps": 3, "method": "full"}, {"streaming"}),
        ({"objective": "dpo", "streaming": True, "max_steps": 3, "precompute_reference": True}, {"streaming"}),
        ({"objective": "simpo", "streaming": True, "max_steps": 3, "method": "full"}, set()),
        ({"qat": "int4_weight_only", "method": "qlora"}, {"qat"}),
        ({"qat": "int4_weight_only", "method": "full", "fp8": True}, {"qat"}),
        ({"qat": "int4_weight_only", "torch_compile": "auto"}, {"qat"}),
        ({"qat": "int8_weight_only", "method": "full"}, set()),
        ({"adapter_type": "oft", "lora_dropout": 0.1, "use_dora": True}, {"lora_dropout", "use_dora"}),
        ({"adapter_type": "oft", "optim": "muon", "torch_compile": "auto"}, {"optim", "torch_compile"}),
        ({"adapter_type": "oft", "loraplus_lr_ratio": 16.0, "qat": "int4_weight_only"}, {"loraplus_lr_ratio", "qat"}),
        ({"adapter_type": "oft", "method": "qlora", "lora_r": 8}, set()),
        ({}, set()),
    ]
    for settings, named in cases:
        assert {c.keys[0] for c in find_conflicts(Recipe(**REQUIRED, **settings))} == named, (settings, named)


@pytest.mark.parametrize(
    ("changes", "field", "found"),
    [
        (
            {"shuffle": False, "dataset": "[{path: a, weight: 1}, {path: b, weight: 2}]"},
            "shuffle",
            "false, with weights, which draw at random",
        ),
        ({"shuffle": False, "streaming": True, "max_steps": 5}, "streaming", "with shuffle false"),
        ({"dedup": True, "streaming": True, "max_steps": 5}, "streaming", "with dedup"),
    ],
)
def test_what_needs_the_whole_data_or_chance_is_refused_without(changes, field, found):
    (conflict,) = find_conflicts(Recipe(**{"model_name_or_path": "m", "dataset": "d", **changes}))
    assert conflict.keys[0] == field and conflict.found == found


def test_a_stream_that_cannot_have_its_reference_is_told_what_can():
    cases = [
        ({"method": "full"}, "--method lora: the reference is then the model without its adapter"),
        ({"precompute_reference": True}, "--precompute_reference false: the reference"),
        ({"precompute_reference": True, "method": "full"}, "--method lora --precompute_reference false: the reference"),
        ({"adapter_name_or_path": "a"}, ""),  # it can only be computed beforehand
    ]
    for case in cases:
        settings, fix = case
        (conflict,) = find_conflicts(Recipe(**REQUIRED, **settings, objective="dpo", streaming=True, max_steps=3))
        assert conflict.fix.startswith(f"--streaming false; or {fix}" if fix else "--streaming false"), case
        assert conflict.fix == "--streaming false" or fix, case


def test_a_batch_that_cannot_be_dealt_is_dealt_otherwise_before_it_is_another():
    cases = [
        (32, 16, 4, "--per_device_train_batch_size 8: the same maths"),
        (30, 4, 1, "--per_device_train_batch_size 3: the same maths"),
        (8, 16, 1, "--per_device_train_batch_size 8: the same maths"),
        (
            30,
            2,
            4,
            "--num_processes 3: the same maths; "
            "or --global_batch_size 24 or --global_batch_size 32, which changes what is learned",
        ),
        (
            9,
            2,
            4,
            "--num_processes 3 --per_device_train_batch_size 1: the same maths; "
            "or --global_batch_size 8 or --global_batch_size 16, which changes what is learned",
        ),
        (3, 1, 4, "--num_processes 3: the same maths; or --global_batch_size 4, which changes what is learned"),
    ]
    for case in cases:
        batch, micro_batch, num_processes, fix = case
        assert fix_of_batch(batch, micro_batch, num_processes) == fix, case


def test_what_is_typed_then_works():
    for batch in range(1, 40):
        for micro_batch in (1, 3, 8):
            for num_processes in (1, 3, 8):
                if batch % (micro_batch * num_processes):
                    words = fix_of_batch(batch, micro_batch, num_processes).partition(":")[0].split()
                    flags = dict(zip(words[::2], map(int, words[1::2]), strict=True))
                    processes = flags.get("--num_processes", num_processes)
                    size = flags.get("--per_device_train_batch_size", micro_batch)
                    assert flags and batch % (processes * size) == 0
                    assert processes <= num_processes and size <= micro_batch


def test_settings_without_effect_are_named():
    cases = [
        ({}, []),
        ({"max_eval_samples": 9}, ["note: no effect without eval_dataset or eval_split_size: max_eval_samples"]),
        ({"max_eval_samples": 9, "eval_split_size": 0.1}, []),
        ({"max_new_tokens": 9}, ["note: no effect without predict_with_generate: max_new_tokens"]),
        ({"max_new_tokens": 128}, []),  # the default
        (
            {"method": "full", "lora_r": 8, "use_dora": True},
            ["note: no effect without method lora or qlora: lora_r, use_dora"],
        ),
        (
            {"embedding_learning_rate": 1e-5},
            ["note: no effect without lora_modules_to_save, trainable_tokens or new_tokens: embedding_learning_rate"],
        ),
        ({"lora_r": 8, "project": "mine"}, ["note: no effect without report_to: project"]),
        (
            {"objective": "dpo", "metric_for_best_model": "eval_rewards/margins"},
            ["note: no effect without keep_best or early_stopping_patience: metric_for_best_model"],
        ),
        ({"objective": "dpo", "metric_for_best_model": "eval_rewards/margins", "keep_best": True}, []),
    ]
    for settings, said in cases:
        assert describe_unused(Recipe(**REQUIRED, **settings)) == said, (settings, said)
