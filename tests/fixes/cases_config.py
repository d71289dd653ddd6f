"""Fixes of the command line, of recipe files and of settings that do not fit together."""

import json
import shlex

from fixes.harness import case

ROW = json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]})
PAIR = json.dumps({"prompt": "Hi", "chosen": "Hello", "rejected": "What?"})
RATED = json.dumps({"prompt": "Hi", "completion": "Hello", "label": True})
STREAM = "finetune --streaming --max_steps 9"
FILE = {"FILE": "more.jsonl"}

UNTYPED = {
    "kit/config/validation.py:problems_with_secrets": "no recipe holds a credential: it is left out",
    "kit/config/conflicts.py:_conflicts_of_answers#1": "renames a function in the user's file",
    "kit/config/recipe_file.py:_own_metrics": "a line to take out of a recipe, and to type: tests/test_own_metric.py",
    **{
        f"kit/own_metric.py:{site}": "changes in the user's file: tests/test_own_metric.py"
        for site in (
            "_check_parameters#1 _check_parameters#2 _check_parameters#3 _imported load#1 load#2 score#1 score#2"
        ).split()
    },
}


def two_files(world):
    """``a.jsonl`` and ``more.jsonl``."""
    world.write("a.jsonl", *[ROW] * 8)
    world.write("more.jsonl", *[ROW] * 9)


def pairs(world, flags):
    """The command that trains on ``pairs.jsonl`` with these flags."""
    world.write("pairs.jsonl", *[PAIR] * 8)
    return f"finetune --dataset pairs.jsonl {flags}"


# --- kit/config/command_line.py


@case("kit/config/command_line.py:_problems_with_words#2")
def the_name_of_a_recipe_without_its_flag(world):
    return "finetune tiny --output_dir new"


@case("kit/config/command_line.py:_problems_with_words#2")
def a_file_without_a_flag(world):
    return "finetune chats.jsonl"


@case("kit/config/command_line.py:_problems_with_words#2")
def a_file_with_a_space_without_a_flag(world):
    world.write("my chats.jsonl", *[ROW] * 9)
    return "finetune 'my chats.jsonl'"


@case("kit/config/command_line.py:_problems_with_words#2")
def a_folder_of_a_model_without_a_flag(world):
    return "finetune model --dataset chats.jsonl --max_length 256"


@case("kit/config/command_line.py:_problems_with_words#2")
def a_single_dash(world):
    return "finetune -learning_rate 1e-4"


@case("kit/config/command_line.py:_problems_with_words#3")
def two_files_for_one_flag(world):
    two_files(world)
    return "finetune --dataset a.jsonl more.jsonl"


@case("kit/config/command_line.py:_problems_with_words#3")
def two_files_with_commas_and_spaces_for_one_flag(world):
    world.write("my, a.jsonl", *[ROW] * 9)
    world.write("b's.jsonl", *[ROW] * 9)
    return """finetune --dataset 'my, a.jsonl' "b's.jsonl" """


@case("kit/config/command_line.py:_problems_with_words#2")
def a_value_with_a_space_that_was_not_quoted(world):
    return "finetune --output_dir my run"


@case("kit/config/command_line.py:_problems_with_words#3")
def two_patterns_for_one_flag(world):
    return "finetune --method full --freeze model.embed* lm_head*"


@case("kit/config/command_line.py:read_flags")
def a_list_given_twice(world):
    two_files(world)
    return "finetune --dataset a.jsonl --dataset more.jsonl"


@case("kit/config/command_line.py:read_flags")
def a_list_with_weights_and_a_file(world):
    two_files(world)
    return "finetune --dataset '[{path: a.jsonl, weight: 2}]' --dataset more.jsonl --dataset chats.jsonl"


@case("kit/config/command_line.py:read_flags")
def columns_given_twice(world):
    world.write("qa.jsonl", *[json.dumps({"q": "Hi", "a": "Hello"})] * 9)
    return "finetune --dataset qa.jsonl --dataset_columns q=prompt --dataset_columns a=completion"


@case("kit/config/command_line.py:_problems_with_words#3")
def a_third_file_after_other_flags(world):
    two_files(world)
    return "finetune --dataset a.jsonl more.jsonl --seed 2 chats.jsonl"


@case("kit/config/command_line.py:_problems_with_words#1")
def words_for_score(world):
    return "score model chats.jsonl chats.jsonl"


@case("kit/config/command_line.py:_problems_with_words#1")
def data_alone_for_score(world):
    return "score chats.jsonl chats.jsonl --model_name_or_path model"


@case("kit/config/command_line.py:read_command_line", values={"NAME": "chats.jsonl"})
def a_score_without_data(world):
    return "score --model_name_or_path model"


# --- kit/config/validation.py


@case("kit/config/validation.py:_unknown#1")
def a_flag_of_another_kit(world):
    return "finetune --num_epochs 2"


@case("kit/config/validation.py:_unknown#3")
def a_flag_with_a_slip(world):
    return "finetune --learning_rte 1e-4"


@case("kit/config/validation.py:_unknown#3", edit=lambda world, problem, _: "finetune --help")
def a_flag_like_no_other(world):
    return "finetune --xyzzy 4"


@case("kit/config/validation.py:validate#1", values={"NAME": "more.jsonl"})
def no_data(world):
    two_files(world)
    world.write("mine.yaml", "model_name_or_path: model", "max_length: 256")
    return "finetune --recipe mine.yaml"


@case("kit/config/validation.py:validate#2")
def a_rate_without_its_minus(world):
    return "finetune --learning_rate 2e5"


@case("kit/config/validation.py:validate#2")
def an_objective_as_the_method(world):
    return pairs(world, "--method dpo")


@case("kit/config/validation.py:validate#2")
def an_objective_as_the_loss_of_dpo(world):
    return pairs(world, "--dpo_loss simpo")


@case(
    "kit/config/validation.py:validate#2",
    edit=lambda _, problem, command: command.replace("ipo", "dpo --dpo_loss ipo"),
    says="use objective: dpo, with dpo_loss: ipo",
)
def a_loss_as_the_objective(world):
    return pairs(world, "--objective ipo")


@case("kit/config/validation.py:validate#2", then="flash_attention_3")
def a_kernel_by_the_short_name_of_another_kit(world):
    return "finetune --attn_implementation fa3"


@case("kit/config/validation.py:validate#2")
def a_text_that_is_blank(world):
    return "finetune --system_prompt '  '"


@case("kit/config/validation.py:validate#2")
def a_choice_with_a_slip(world):
    return "finetune --lr_scheduler_type cosin"


@case("kit/config/validation.py:_inside_entry", edit=lambda _, problem, command: command.replace("wieght", "weight"))
def a_key_of_a_data_set_with_a_slip(world):
    return "finetune --dataset '[{path: chats.jsonl, wieght: 1}]'"


# --- kit/config/recipe_file.py, kit/config/hints.py


@case("kit/config/recipe_file.py:find_file")
def a_recipe_with_a_slip(world):
    return "finetune --recipe tinny"


@case("kit/config/recipe_file.py:find_file")
def a_config_with_a_slip(world):
    return "finetune --config singel"


@case("kit/config/recipe_file.py:find_file")
def a_recipe_for_a_config(world):
    return "finetune --config tiny --output_dir new --max_length 256"


@case("kit/config/recipe_file.py:find_file")
def a_config_for_a_recipe(world):
    return "finetune --recipe single"


@case("kit/config/recipe_file.py:find_file")
def an_objective_behind_the_name_of_a_recipe(world):
    return pairs(world, "--recipe tiny-orpo --output_dir new --predict_with_generate false")


@case("kit/config/recipe_file.py:find_file", says="lists them")
def a_recipe_like_no_other(world):
    return "finetune --recipe xyzzy"


@case("kit/config/hints.py:other_kind#1")
def a_file_of_accelerate_for_a_recipe(world):
    world.write("my config.yaml", "distributed_type: 'NO'", "mixed_precision: 'no'")
    return "finetune --recipe 'my config.yaml'"


@case("kit/config/hints.py:other_kind#2")
def a_recipe_file_for_a_config(world):
    world.write("mine.yaml", "model_name_or_path: model", "dataset: chats.jsonl", "max_length: 256")
    return "finetune --config mine.yaml"


def corrected(name, old, new):
    """An edit of a file."""

    def edit(world, problem, command):
        path = world.folder / name
        path.write_text(path.read_text().replace(old, new))
        return command

    return edit


MINE = ("model_name_or_path: model", "dataset: chats.jsonl", "max_length: 256")


def moved_to_the_command_line(world, problem, command):
    path = world.folder / "mine.yaml"
    path.write_text("".join(f"{line}\n" for line in MINE))
    return f"{command} {problem.fix.rpartition(': ')[2]}"


@case("kit/config/validation.py:_unknown#2", edit=moved_to_the_command_line)
def a_flag_of_the_command_line_in_a_recipe(world):
    world.write("mine.yaml", *MINE, "num_processes: 1")
    return "finetune --recipe mine.yaml"


@case("kit/config/recipe_file.py:_section", edit=corrected("mine.yaml", "lroa", "lora"))
def a_method_with_a_slip(world):
    world.write("mine.yaml", *MINE, "by_method:", "  lroa:", "    learning_rate: 1e-4")
    return "finetune --recipe mine.yaml"


@case("kit/config/recipe_file.py:_section", edit=corrected("mine.yaml", "dop", "dpo"))
def an_objective_with_a_slip(world):
    world.write("mine.yaml", *MINE, "by_objective:", "  dop:", "    learning_rate: 1e-6")
    return "finetune --recipe mine.yaml"


@case(
    "kit/config/recipe_file.py:_section",
    says="put it under by_method",
    edit=corrected("mine.yaml", "objective", "method"),
)
def a_method_under_by_objective(world):
    world.write("mine.yaml", *MINE, "by_objective:", "  lora:", "    learning_rate: 1e-4")
    return "finetune --recipe mine.yaml"


@case(
    "kit/config/recipe_file.py:_problems_with_keys#1",
    edit=corrected("mine.yaml", "by_objective: {dpo: {by_method: {lora", "by_method: {lora: {by_objective: {dpo"),
)
def by_method_within_by_objective(world):
    world.write("mine.yaml", *MINE, "by_objective: {dpo: {by_method: {lora: {beta: 0.3}}}}")
    return "finetune --recipe mine.yaml"


@case(
    "kit/config/recipe_file.py:_problems_with_keys#2",
    edit=corrected("mine.yaml", "by_objective:\n  sft:\n    method", "method"),
)
def a_method_chosen_by_objective(world):
    world.write("mine.yaml", *MINE, "by_objective:", "  sft:", "    method: full")
    return "finetune --recipe mine.yaml"


@case("kit/config/recipe_file.py:_problems_with_keys#3", edit=corrected("mine.yaml", "learning_rte", "learning_rate"))
def a_key_of_another_method_with_a_slip(world):
    world.write("mine.yaml", *MINE, "by_method:", "  full:", "    learning_rte: 1e-4")
    return "finetune --recipe mine.yaml"


@case("kit/config/recipe_file.py:_duplicates", edit=corrected("mine.yaml", "seed: 1\n", ""))
def a_key_given_twice(world):
    world.write("mine.yaml", *MINE, "seed: 1", "seed: 2")
    return "finetune --recipe mine.yaml"


# --- kit/config/conflicts.py


@case("kit/config/conflicts.py:_conflicts_of_batch")
def a_batch_that_is_not_divisible(world):
    return "finetune --global_batch_size 30 --per_device_train_batch_size 4"


@case("kit/config/conflicts.py:_conflicts_of_batch")
def a_batch_below_the_micro_batch(world):
    return "finetune --global_batch_size 8 --per_device_train_batch_size 16"


@case("kit/config/conflicts.py:_conflicts_of_datasets")
def weights_without_shuffling(world):
    two_files(world)
    return "finetune --shuffle false --dataset '[{path: a.jsonl, weight: 1}, {path: more.jsonl, weight: 2}]'"


@case("kit/config/conflicts.py:_conflicts_of_entries#1")
def two_data_sets_of_one_name(world):
    world.write("x/a.jsonl", *[ROW] * 9)
    two_files(world)
    return "finetune --dataset a.jsonl,x/a.jsonl"


@case("kit/config/conflicts.py:_conflicts_of_entries#1")
def one_data_set_twice(world):
    two_files(world)
    return "finetune --dataset a.jsonl,a.jsonl"


@case("kit/config/conflicts.py:_conflicts_of_entries#2")
def weights_of_evaluation_data(world):
    two_files(world)
    return "finetune --eval_dataset '[{path: a.jsonl, weight: 1}, {path: more.jsonl, weight: 2}]'"


@case("kit/config/conflicts.py:_conflicts_of_entries#3")
def a_weight_that_is_missing(world):
    two_files(world)
    return "finetune --dataset '[{path: a.jsonl, weight: 1}, {path: more.jsonl}]'"


@case("kit/config/conflicts.py:_conflicts_of_entries#4")
def weights_of_zero(world):
    two_files(world)
    return "finetune --dataset '[{path: a.jsonl, weight: 0}, {path: more.jsonl, weight: 0}]'"


@case("kit/config/conflicts.py:_conflicts_of_streaming#1")
def a_stream_without_an_end(world):
    return "finetune --streaming"


@case("kit/config/conflicts.py:_conflicts_of_streaming#2")
def a_stream_of_n_samples(world):
    return f"{STREAM} --max_train_samples 9"


@case("kit/config/conflicts.py:_conflicts_of_streaming#3")
def a_stream_without_repeated_rows(world):
    return f"{STREAM} --dedup"


@case("kit/config/conflicts.py:_conflicts_of_streaming#4")
def a_stream_in_order(world):
    return f"{STREAM} --shuffle false"


@case("kit/config/conflicts.py:_conflicts_of_streaming#5", says="save_strategy")
def a_stream_saved_by_epochs(world):
    return f"{STREAM} --save_strategy epoch"


@case("kit/config/conflicts.py:_conflicts_of_streaming#5", says="eval_strategy")
def a_stream_evaluated_by_epochs(world):
    return f"{STREAM} --eval_strategy epoch --eval_dataset chats.jsonl"


@case("kit/config/conflicts.py:_conflicts_of_streaming#6", values=FILE)
def a_split_of_a_stream(world):
    two_files(world)
    return f"{STREAM} --eval_split_size 0.1"


@case("kit/config/conflicts.py:_conflicts_of_streaming#7")
def several_streams_without_weights(world):
    two_files(world)
    return f"{STREAM} --dataset a.jsonl,more.jsonl"


@case("kit/config/conflicts.py:_conflicts_of_streaming#8")
def a_stream_of_drawn_rows(world):
    two_files(world)
    return f"{STREAM} --dataset '[{{path: a.jsonl, max_samples: 3}}]'"


@case("kit/config/conflicts.py:_conflicts_of_streaming#9")
def streams_mixed_by_tokens(world):
    two_files(world)
    data = "[{path: a.jsonl, weight: 1}, {path: more.jsonl, weight: 2}]"
    return f"{STREAM} --mixing tokens --dataset {shlex.quote(data)}"


@case("kit/config/conflicts.py:_conflicts_of_objective#1")
def the_loss_of_another_objective(world):
    return pairs(world, "--objective simpo --dpo_loss ipo")


@case(
    "kit/config/conflicts.py:_conflicts_of_objective#1",
    says="mine.yaml:4 beta",
    edit=corrected("mine.yaml", "beta: 0.3", "by_objective: {dpo: {beta: 0.3}}"),
)
def a_recipe_for_several_objectives(world):
    world.write("mine.yaml", *MINE, "beta: 0.3")
    return "finetune --recipe mine.yaml"


@case("kit/config/conflicts.py:_conflicts_of_objective#2")
def smoothed_labels_with_a_loss_that_has_none(world):
    return pairs(world, "--objective dpo --dpo_loss ipo --label_smoothing 0.1")


@case("kit/config/conflicts.py:_conflicts_of_objective#3")
def robust_against_nothing(world):
    return pairs(world, "--objective dpo --dpo_loss robust")


@case("kit/config/conflicts.py:_conflicts_of_objective#4")
def accuracies_without_pairs(world):
    return "finetune --eval_split_size 0.5 --keep_best --metric_for_best_model eval_rewards/accuracies"


@case("kit/config/conflicts.py:_conflicts_of_objective#5")
def a_reference_that_the_adapter_begins_beside(world):
    return pairs(world, "--objective dpo --method lora --init_lora_weights orthogonal")


@case("kit/config/conflicts.py:_conflicts_of_objective#6")
def prompts_that_are_learned_from_pairs(world):
    return pairs(world, "--objective orpo --train_on all")


@case("kit/config/conflicts.py:_conflicts_of_objective#7")
def pairs_in_pieces(world):
    return pairs(world, "--objective cpo --excess_length_strategy split")


@case("kit/config/conflicts.py:_conflicts_of_objective#8")
def a_stream_of_rated_answers(world):
    world.write("rated.jsonl", *[RATED, RATED.replace("true", "false")] * 4)
    return f"{STREAM} --dataset rated.jsonl --objective kto"


@case("kit/config/conflicts.py:_conflicts_of_objective#9")
def a_stream_with_a_reference_that_changes(world):
    return pairs(world, "--streaming --max_steps 2 --global_batch_size 2 --objective dpo --method full")


@case("kit/config/conflicts.py:_conflicts_of_objective#9")
def a_stream_with_a_reference_computed_before(world):
    return pairs(world, "--streaming --max_steps 2 --global_batch_size 2 --objective dpo --precompute_reference")


@case("kit/config/conflicts.py:_conflicts_of_attention#1")
def varlen_without_packing(world):
    return "finetune --attn_implementation varlen"


@case("kit/strategy/kernels.py:check_kernels#2")
def fp8_in_float32(world):
    return "finetune --fp8"


@case("kit/config/conflicts.py:_conflicts_of_method#6")
def fp8_with_a_base_of_4_bits(world):
    return "finetune --config single --method qlora --fp8"


@case("kit/strategy/kernels.py:check_kernels#1")
def flash_attention_3_on_a_cpu(world):
    return "finetune --attn_implementation flash_attention_3 --packing"


@case("kit/config/conflicts.py:_conflicts_of_attention#2", then="needs flash_attn")
def flash_attention_with_packing(world):
    return "finetune --attn_implementation flash_attention_2 --packing"


@case("kit/config/conflicts.py:_conflicts_of_strategies#1")
def steps_without_their_number(world):
    return "finetune --save_strategy steps"


@case("kit/config/conflicts.py:_conflicts_of_strategies#2")
def epochs_with_a_number_of_steps(world):
    return "finetune --eval_strategy epoch --eval_steps 5 --eval_dataset chats.jsonl"


@case("kit/config/conflicts.py:_conflicts_of_strategies#2")
def no_saving_with_a_number_of_steps(world):
    return "finetune --save_strategy no --save_steps 5"


@case("kit/config/conflicts.py:_conflicts_of_schedule#1")
def a_least_rate_that_is_missing(world):
    return "finetune --lr_scheduler_type cosine_with_min_lr"


@case("kit/config/conflicts.py:_conflicts_of_schedule#2")
def a_decay_that_is_missing(world):
    return "finetune --lr_scheduler_type warmup_stable_decay"


@case("kit/config/conflicts.py:_conflicts_of_schedule#3", says="min_lr_rate")
def a_least_rate_without_its_shape(world):
    return "finetune --min_lr_rate 0.1"


@case("kit/config/conflicts.py:_conflicts_of_schedule#3", says="lr_decay_steps")
def a_decay_without_its_shape(world):
    return "finetune --lr_decay_steps 0.1"


@case("kit/config/conflicts.py:_conflicts_of_evaluation#1")
def a_split_and_evaluation_data(world):
    return "finetune --eval_dataset chats.jsonl --eval_split_size 0.1"


@case("kit/config/conflicts.py:_conflicts_of_evaluation#2", values=FILE)
def evaluation_without_data(world):
    two_files(world)
    return "finetune --eval_steps 5"


@case("kit/config/conflicts.py:_conflicts_of_evaluation#2", values=FILE)
def evaluation_of_a_stream_without_data(world):
    two_files(world)
    return f"{STREAM} --eval_steps 5"


@case("kit/config/conflicts.py:_conflicts_of_evaluation#2", values=FILE)
def the_best_checkpoint_without_data(world):
    two_files(world)
    return "finetune --keep_best"


@case("kit/config/conflicts.py:_conflicts_of_evaluation#3")
def early_stopping_without_evaluations(world):
    return "finetune --early_stopping_patience 2 --eval_dataset chats.jsonl"


@case("kit/config/conflicts.py:_conflicts_of_evaluation#3")
def early_stopping_of_a_stream_without_evaluations(world):
    return f"{STREAM} --early_stopping_patience 2 --eval_dataset chats.jsonl"


@case("kit/config/conflicts.py:_conflicts_of_evaluation#4")
def a_threshold_without_patience(world):
    return "finetune --early_stopping_threshold 0.1 --eval_dataset chats.jsonl --eval_steps 2"


@case("kit/config/conflicts.py:_conflicts_of_answers#2")
def top_p_of_greedy_answers(world):
    return "finetune --predict_with_generate true --eval_split_size 5 --top_p 0.9"


@case("kit/config/conflicts.py:_conflicts_of_answers#3")
def the_best_by_a_metric_that_is_not_computed(world):
    return "finetune --metric_for_best_model eval_token_f1 --keep_best --eval_split_size 5"


@case("kit/config/conflicts.py:_conflicts_of_method#1", then="adapter_name_or_path")
def an_adapter_with_method_full(world):
    return "finetune --method full --adapter_name_or_path nowhere"


@case("kit/config/conflicts.py:_conflicts_of_method#2")
def freeze_and_train_only(world):
    return "finetune --method full --freeze model.embed* --train_only model.layers.1.*"


@case("kit/config/conflicts.py:_conflicts_of_optimiser#1")
def lion_at_the_rate_of_adamw(world):
    return "finetune --config single --method lora --optim lion_8bit"


@case("kit/config/command_line.py:_problems_with_rate_of_file")
def lion_at_the_rate_of_a_recipe(world):
    return "finetune --recipe tiny --config single --optim lion_8bit"


@case("kit/config/conflicts.py:_conflicts_of_optimiser#2")
def weights_of_adapters_in_bf16(world):
    return "finetune --config single --method lora --optim adamw_bf16"


@case("kit/config/conflicts.py:_conflicts_of_method#3")
def freeze_with_adapters(world):
    return "finetune --freeze model.embed*"


@case("kit/config/conflicts.py:_conflicts_of_method#4", then="adapter_name_or_path")
def new_tokens_for_an_adapter(world):
    return "finetune --new_tokens '<a>' --adapter_name_or_path nowhere"


@case("kit/config/conflicts.py:_conflicts_of_method#7")
def an_odd_rank_that_begins_orthogonal(world):
    return "finetune --init_lora_weights orthogonal --lora_r 3"


@case("kit/config/conflicts.py:_conflicts_of_adapter_type")
def dropout_of_oft(world):
    return "finetune --adapter_type oft --lora_dropout 0.1"


@case("kit/config/conflicts.py:_conflicts_of_method#5")
def dora_on_four_bits(world):
    return "finetune --method qlora --use_dora"
