"""Everything that can be wrong before a weight is read is reported at once, and the checks write nothing."""

import shutil
import sys
from importlib.abc import MetaPathFinder
from types import SimpleNamespace

import pytest
from helpers import ROOT
from preflight_helpers import ONE_PROCESS, wrong
from safetensors.torch import load_file, save_file

from kit.config.launch_flags import Launch
from kit.config.recipe import Recipe
from kit.memory.fit import check_disk
from kit.model.build import open_config
from kit.preflight import preflight
from kit.preflight.inputs import check_inputs
from kit.strategy.strategies import FSDP2
from kit.strategy.topology import Topology
from kit.system.errors import UserError


def test_model_data_and_strategy_are_all_reported_at_once(recipe, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"messages": 3}\n')
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("mine")
    mine = recipe(dataset=str(tmp_path / "rows.jsonl"), max_length=4096, lora_target_modules="q_porj")
    sharded = Topology(
        strategy=FSDP2,
        config_name="fsdp",
        num_processes=2,
        mixed_precision="no",
        device_type="cpu",
        layer_classes=("NoSuchLayer",),
    )
    problems = wrong(mine, sharded, "mine")
    assert problems[:3] == ["max_length", "lora_target_modules", "fsdp_transformer_layer_cls_to_wrap"]
    assert len(problems) == 5 and {"output_dir", f"{tmp_path}/rows.jsonl:1 messages"} == set(problems[3:])
    assert preflight.check(recipe(), ONE_PROCESS).folder is None  # what has no output folder looks at none


def test_what_cannot_be_opened_does_not_hide_what_is_wrong_elsewhere(recipe):
    problems = wrong(
        recipe(model_name_or_path="./nowhere", dataset="nowhere.jsonl", eval_dataset="none.jsonl"), ONE_PROCESS
    )
    assert problems == [
        "dataset",
        "eval_dataset",
        "model_name_or_path",
    ]  # once, though tokenizer and config both need it


def test_a_disk_without_room_for_checkpoints_and_the_final_model_is_refused(recipe, tmp_path, monkeypatch):
    trained = recipe(method="full", save_steps=0)
    size = 12 * sum(p.numel() for p in preflight.check(trained).meta_model.parameters())  # of a checkpoint
    free = size * 4 // 3  # with the final model, in float32
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    preflight.check(trained, ONE_PROCESS, "mine")
    free -= 1
    assert wrong(trained, ONE_PROCESS, "mine", launch=Launch(dry_run=True)) == ["output_dir"]
    preflight.check(trained, ONE_PROCESS, "mine", launch=Launch(skip_memory_check=True))
    free += 1
    lasting = trained.model_copy(update={"save_steps": "auto", "save_total_limit": 1})
    assert wrong(lasting, ONE_PROCESS, "mine") == ["output_dir"]
    checkpoint = tmp_path / "out/checkpoints/step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(bytes(size))  # a continued run needs no room for it
    check_disk(lasting, ONE_PROCESS, open_config(lasting))
    free = 0  # also of a run whose memory is not planned
    assert wrong(recipe(trainable_tokens="red", output_dir=str(tmp_path / "new")), ONE_PROCESS, "mine") == [
        "output_dir"
    ]


def test_to_look_is_to_write_nothing(recipe, tmp_path, model_folder):
    before = sorted([*tmp_path.rglob("*"), *model_folder.rglob("*")])
    checked = preflight.check(recipe(eval_split_size=5, num_train_epochs=2), ONE_PROCESS, "mine")
    assert sorted([*tmp_path.rglob("*"), *model_folder.rglob("*")]) == before
    assert checked.folder.path == tmp_path / "out" and checked.total_steps == checked.data.total_steps(checked.recipe)
    assert checked.vocab_size == 320 and all(p.is_meta for p in checked.meta_model.parameters())


@pytest.mark.slow
def test_a_length_that_nobody_set_is_cut_to_what_the_model_reads(recipe, model_folder, chat_file, tmp_path):
    plain = {"model_name_or_path": str(model_folder), "dataset": str(chat_file)}
    assert preflight.check(Recipe(**plain)).recipe.max_length == 1024
    (tmp_path / "rows.jsonl").write_text('{"anchor": "2 + 2?", "positive": "4"}\n' * 3)
    embed = Recipe(**plain | {"dataset": str(tmp_path / "rows.jsonl")}, objective="embed")
    assert preflight.check(embed).config.sentence_transformers["max_length"] == 1024
    assert wrong(recipe(max_length=1025)) == ["max_length"]
    assert preflight.check(recipe(max_length=300)).recipe.max_length == 300


@pytest.fixture
def silent(model_folder, tmp_path):
    """A model that was never trained to write its special tokens, among them those that end an answer."""
    base = shutil.copytree(model_folder, tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    weights["lm_head.weight"][:3] = 0
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    return base


@pytest.mark.slow
def test_columns_template_and_stop_token_are_reported_together_each_as_if_the_advice_before_was_followed(
    recipe, silent, tmp_path
):
    (silent / "chat_template.jinja").unlink()
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "2 + 2?", "answer": "4"}\n' * 3)
    flags = {"model_name_or_path": str(silent), "dataset": str(data)}
    check_inputs(recipe(**flags))  # it leaves such columns to the later checks
    assert wrong(recipe(**flags), ONE_PROCESS, "mine") == [str(data), "chat_template", "trainable_tokens"]
    flags |= {"dataset_columns": "question=instruction,answer=output", "chat_template": "alpaca"}
    assert preflight.check(recipe(**flags, trainable_tokens="<|im_end|>"), ONE_PROCESS, "mine")


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [{}, {"streaming": True, "max_steps": 2}])
def test_a_run_that_could_not_learn_to_stop_is_refused(recipe, silent, streaming):
    flags = {"model_name_or_path": str(silent), **streaming}
    assert wrong(recipe(**flags), ONE_PROCESS, "mine") == ["trainable_tokens"]
    assert preflight.check(recipe(**flags))  # scores or shows samples, and trains nothing
    assert preflight.check(recipe(**flags, trainable_tokens="<|im_end|>"), ONE_PROCESS, "mine")
    assert preflight.check(recipe(**flags, method="full"), ONE_PROCESS, "mine")


def test_a_bitsandbytes_that_is_installed_but_broken_is_reported_and_not_a_crash_at_loading(recipe, monkeypatch):
    class Broken(MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "bitsandbytes":
                raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(UserError) as caught:
        preflight.check(recipe(method="qlora"), ONE_PROCESS)
    assert "method: bitsandbytes is installed but broken (libcudart.so.13: cannot open" in str(caught.value)
    assert "python -m bitsandbytes" in str(caught.value)


def test_rows_that_a_run_with_images_cannot_use_are_reported(tmp_path):
    model, rows = ROOT / "recipes/tiny-vision/model", tmp_path / "texts.jsonl"
    rows.write_text('{"text": ""}\n' * 3)
    images = Recipe(model_name_or_path=str(model), dataset=str(rows), output_dir=str(tmp_path / "out"), max_steps=1)
    assert "texts.jsonl:1" in " ".join(wrong(images, ONE_PROCESS, "mine"))
