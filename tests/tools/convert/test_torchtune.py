"""Files of torchtune become recipes that load and learn the same, or say by key what they cannot."""

import re

import pytest

from kit.config.conflicts import find_conflicts
from kit.errors import UserError

FILE = {
    "output_dir": "out",
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "t.model", "max_seq_len": 512},
    "model": {
        "_component_": "torchtune.models.llama3_2.lora_llama3_2_1b",
        "lora_attn_modules": ["q_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "apply_lora_to_output": False,
        "lora_rank": 64,
        "lora_alpha": 128,
    },
    "checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "/models/llama",
        "output_dir": "${output_dir}",
    },
    "dataset": {
        "_component_": "torchtune.datasets.chat_dataset",
        "source": "json",
        "data_files": "chats.jsonl",
        "conversation_column": "turns",
        "conversation_style": "sharegpt",
        "packed": False,
        "split": "train",
    },
    "seed": None,
    "shuffle": True,
    "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": "3e-4"},
    "lr_scheduler": {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 100,
    },
    "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
    "epochs": 1,
    "batch_size": 2,
    "gradient_accumulation_steps": 8,
    "clip_grad_norm": None,
    "device": "cuda",
    "dtype": "bf16",
}

NO_ADAPTER = dict.fromkeys(("lora_rank", "lora_alpha", "lora_attn_modules", "apply_lora_to_mlp"))


def changed(**parts):
    return FILE | {key: FILE.get(key, {}) | part if isinstance(part, dict) else part for key, part in parts.items()}


@pytest.mark.parametrize(
    ("logger", "trackers", "project"),
    [("WandBLogger", ["wandb"], "p"), ("CometLogger", ["comet_ml"], "p"), ("DiskLogger", [], "kit")],
)
def test_a_logger_becomes_the_tracker_that_it_writes_to(converted, logger, trackers, project):
    component = f"torchtune.training.metric_logging.{logger}"
    _, recipe = converted(FILE | {"metric_logger": {"_component_": component, "project": "p", "log_dir": "out"}})
    assert (recipe.report_to, recipe.project) == (trackers, project)


def test_a_file_becomes_a_recipe_with_the_defaults_of_that_kit(converted):
    result, recipe = converted(FILE)
    assert (result.kit, result.config, recipe.method) == ("torchtune", "single", "lora")
    assert (recipe.model_name_or_path, recipe.chat_template) == ("/models/llama", "llama3")
    assert recipe.lora_target_modules == ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert (recipe.lora_r, recipe.lora_alpha) == (64, 128)
    assert (recipe.dataset, recipe.dataset_columns) == ("chats.jsonl", {"turns": "conversations"})
    assert (recipe.max_length, recipe.global_batch_size, recipe.learning_rate) == (512, 16, 3e-4)
    # torch's own weight decay, and no clipping: both differ here.
    assert (recipe.weight_decay, recipe.max_grad_norm, recipe.warmup_steps) == (0.01, 0, 100)


@pytest.mark.parametrize(
    ("parts", "name", "value"),
    [
        ({"model": {"_component_": "torchtune.models.llama3_2.qlora_llama3_2_1b"}}, "method", "qlora"),
        ({"model": {"apply_lora_to_output": True, "apply_lora_to_mlp": False}}, "lora_target_modules",
         ["q_proj", "o_proj", "lm_head"]),
        ({"dataset": {"train_on_input": True}}, "train_on", "all"),
        ({"lr_scheduler": None}, "lr_scheduler_type", "constant"),
        ({"tokenizer": {"max_seq_len": None}}, "excess_length_strategy", "error"),
        ({"max_steps_per_epoch": 50, "epochs": 3}, "max_steps", 150),
        ({"clip_grad_norm": 1.0}, "max_grad_norm", 1.0),
        ({"compile": True}, "torch_compile", True),
        ({"enable_activation_checkpointing": True}, "gradient_checkpointing", True),
        ({"optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"}}, "optim", "paged_adamw_8bit"),
        ({"optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW"}}, "optim", "paged_adamw_32bit"),
        ({"output_dir": "${checkpointer.checkpoint_dir}/tuned"}, "output_dir", "/models/llama/tuned"),
        ({"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.2}}, "beta", 0.2),
        ({"model": {"_component_": "torchtune.models.llama3.llama3_8b", **NO_ADAPTER}}, "optim", "adamw_bf16"),
        ({}, "optim", "adamw_torch_fused"),
    ],
)  # fmt: skip
def test_a_key_means_what_its_value_says(converted, parts, name, value):
    assert getattr(converted(changed(**parts))[1], name) == value


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        ({"optimizer": {"_component_": "torch.optim.SGD"}}, "optimizer._component_"),
        ({"tokenizer": {"_component_": "torchtune.models.gemma.gemma_tokenizer"}}, "tokenizer._component_"),
    ],
)  # fmt: skip
def test_what_changes_what_is_learned_is_refused_by_its_key_until_it_is_dropped(converted, parts, key):
    with pytest.raises(UserError, match=f"--drop {key} leaves it out"):
        converted(changed(**parts))
    converted(changed(**parts), drop=[key])


@pytest.mark.parametrize(
    ("parts", "processes", "smaller"),
    [
        ({}, 1, {"adamw_8bit"}),
        ({"model": {"_component_": "torchtune.models.llama3.llama3_8b", **NO_ADAPTER}}, 1, set()),  # adamw_bf16
        ({"model": {"_component_": "torchtune.models.llama3.llama3_8b", **NO_ADAPTER}, "dtype": "fp32"}, 1,
         {"adamw_8bit", "adamw_bf16"}),
        ({"optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"}}, 1, set()),
        ({}, 2, set()),
    ],
)  # fmt: skip
def test_an_update_in_the_backward_pass_is_left_out_with_the_smaller_optimisers_that_work(
    converted, parts, processes, smaller
):
    result, recipe = converted(changed(optimizer_in_bwd=True, **parts), num_processes=processes)
    (reason,) = (each.reason for each in result.draft.left_out if each.key == "optimizer_in_bwd")
    assert "norm of all gradients" in reason
    assert set(re.findall(r"--optim (\w+)", reason)) == smaller
    for optim in smaller:
        assert not find_conflicts(recipe.model_copy(update={"optim": optim}))


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"loss": {"_component_": "torchtune.rlhf.loss.PPOLoss"}}, "nothing learns from rewards"),
        ({"model": {"_component_": "torchtune.models.llama3_2_vision.llama3_2_vision_11b"}}, "only text"),
        ({"dataset": {"_component_": "torchtune.datasets.multimodal.the_cauldron_dataset"}}, "no builder"),
        ({"optimizer": None}, "trains nothing"),
        ({"checkpointer": {"_component_": "torchtune.training.FullModelMetaCheckpointer"}}, "Meta's format"),
        ({"batch_size": "many"}, "a value of a wrong kind"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(converted, parts, says):
    with pytest.raises(UserError, match=says):
        converted(changed(**parts))


def test_training_for_a_quantised_model_is_taken_over(converted):
    quantizer = {"_component_": "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer", "groupsize": 32}
    result, recipe = converted(changed(quantizer=quantizer, compile=True, fake_quant_after_n_steps=None))
    assert (recipe.qat, recipe.qat_group_size) == ("int8_dynamic_activation_int4_weight", 32)
    assert not recipe.torch_compile and "compile" in [each.key for each in result.draft.left_out]
    with pytest.raises(UserError, match="fake_quant_after_n_steps"):
        converted(changed(quantizer=quantizer, fake_quant_after_n_steps=1000))
