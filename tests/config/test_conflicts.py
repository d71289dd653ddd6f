"""Settings that are right alone and wrong together are named, with one that works."""

from kit.config.conflicts import RULES, describe_unused, find_conflicts
from kit.config.recipe import Recipe

REQUIRED = {"model_name_or_path": "m", "dataset": "d"}
PLAYED = {"objective": "grpo", "rewards": "number", "tools": "t.py:f", "eval_dataset": "e", "keep_best": True}
PLAYED |= {"eval_steps": 1, "save_steps": 1, "predict_with_generate": True}


def test_settings_that_contradict_each_other_are_named():
    """Others are typed in tests/cli/surface.txt, and started in tests/promises/test_whole_way.py."""
    cases = [
        ({"method": "full", "adapter_name_or_path": "a"}, {"adapter_name_or_path"}),
        ({"save_strategy": "no"}, set()),
        ({"eval_strategy": "no", "eval_steps": 5, "eval_dataset": "e"}, {"eval_strategy"}),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, {"lr_scheduler_type"}),
        ({"lr_scheduler_type": "warmup_stable_decay", "min_lr_rate": 0.1}, {"lr_scheduler_type"}),
        ({"early_stopping_patience": 2, "eval_dataset": "e", "eval_strategy": "epoch"}, set()),
        ({"new_tokens": "<a>", "adapter_name_or_path": "a"}, {"new_tokens"}),
        ({"beta": 0.1}, {"beta"}),
        ({"objective": "cpo", "desirable_weight": 2}, {"desirable_weight"}),
        ({"objective": "dpo", "dpo_loss": "ipo", "label_smoothing": 0.1}, {"label_smoothing"}),
        ({"metric_for_best_model": "eval_rewards/margins"}, {"metric_for_best_model"}),
        ({"objective": "kto", "metric_for_best_model": "eval_rewards/accuracies"}, {"metric_for_best_model"}),
        ({"objective": "kto", "metric_for_best_model": "eval_rewards/margins"}, set()),
        ({"objective": "dpo", "streaming": True, "max_steps": 3}, set()),
        ({"qat": "int4_weight_only", "method": "qlora"}, {"qat"}),
        ({"qat": "int4_weight_only", "method": "full", "fp8": True}, {"qat"}),
        ({"qat": "int4_weight_only"}, set()),  # with torch_compile auto, which yields
        ({"qat": "int4_weight_only", "torch_compile": True}, {"torch_compile"}),
        ({"tiled_mlp": True, "gradient_checkpointing": True, "torch_compile": True}, {"torch_compile"}),
        ({"adapter_type": "oft", "torch_compile": True}, {"torch_compile"}),
        ({"adapter_type": "oft", "torch_compile": False}, set()),
        ({"dataset": "[{path: a, weight: 1}, {path: b, weight: 2}]", "shuffle": False}, {"shuffle"}),
        ({"dataset": "[{path: a, weight: 1}, {path: b}]"}, {"dataset"}),
        ({"dataset": "[{path: a/x.jsonl}, {path: b/x.jsonl}]"}, {"dataset"}),
        ({"eval_dataset": "[{path: a, weight: 1}]"}, {"eval_dataset"}),
        ({"metrics": "m.py:loss", "predict_with_generate": True, "eval_dataset": "e"}, {"metrics"}),
        ({"metric_for_best_model": "eval_number", "eval_dataset": "e"}, {"metric_for_best_model"}),
        (PLAYED | {"metric_for_best_model": "eval_reward"}, set()),
        (PLAYED | {"metric_for_best_model": "eval_reward", "tools": []}, set()),
        (PLAYED | {"metric_for_best_model": "eval_reward", "predict_with_generate": False}, {"metric_for_best_model"}),
        ({"num_return_sequences": 3}, {"num_return_sequences"}),
        ({"embedding_learning_rate": 1e-5}, {"embedding_learning_rate"}),
        *(
            ({"objective": "grpo", "rewards": "number", **given}, {next(iter(given))})
            for given in (
                {"scale_rewards": "group", "policy_loss": "rloo"},
                {"kl_estimator": "k2", "policy_loss": "rloo", "beta": 0.1},
                {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
                {"multi_objective_aggregation": "normalize_then_sum", "policy_loss": "rloo"},
                {"importance_sampling_level": "token", "policy_loss": "gspo"},
                {"importance_sampling_level": "sequence", "policy_loss": "sapo"},
                {"rollout_temperature": 0.7, "objective": "sft", "rewards": []},
            )
        ),
        ({"objective": "grpo", "rewards": "number", "policy_loss": "rloo", "beta": 0.1}, set()),
        ({}, set()),
    ]
    for settings, named in cases:
        found = list(find_conflicts(Recipe(**REQUIRED | settings), {}, set()))
        assert {problem.where for problem in found} == named, (settings, found)


def test_a_rule_names_settings_and_is_not_asked_where_one_of_them_is_wrong_by_itself():
    for rule in RULES:
        assert set(rule.keys.split()) <= set(Recipe.model_fields), rule
    recipe = Recipe(**REQUIRED, global_batch_size=10, per_device_train_batch_size=4)
    (problem,) = find_conflicts(recipe, {"global_batch_size": "mine.yaml:3 global_batch_size"}, set())
    assert str(problem).startswith("mine.yaml:3 global_batch_size: 10 is not divisible by")
    assert not list(find_conflicts(recipe, {}, {"per_device_train_batch_size"}))


def test_settings_without_effect_are_named():
    cases = [
        ({}, []),
        ({"max_eval_samples": 9}, ["note: no effect without eval_dataset or eval_split_size: max_eval_samples"]),
        ({"max_eval_samples": 9, "eval_split_size": 0.1}, []),
        ({"max_new_tokens": 128}, []),  # the default
        (
            {"method": "full", "lora_r": 8, "use_dora": True},
            ["note: no effect without method lora or method qlora: lora_r, use_dora"],
        ),
        (
            {"adapter_name_or_path": "a", "lora_r": 8, "lora_alpha": 4, "lora_target_modules": "q_proj"},
            ["note: no effect without adapter_name_or_path none: lora_r, lora_alpha, lora_target_modules"],
        ),
        ({"adapter_type": "oft", "lora_r": 8}, ["note: no effect without adapter_type lora: lora_r"]),
        (
            {"objective": "dpo", "metric_for_best_model": "eval_rewards/margins"},
            ["note: no effect without keep_best or early_stopping_patience: metric_for_best_model"],
        ),
        ({"objective": "dpo", "metric_for_best_model": "eval_rewards/margins", "keep_best": True}, []),
    ]
    for settings, said in cases:
        assert describe_unused(Recipe(**REQUIRED, **settings)) == said, (settings, said)
