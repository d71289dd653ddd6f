"""Vision-language models match their own processor and forward pass, padded and packed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, matrix
from preflight_helpers import ONE_PROCESS, wrong
from transformers.models.smolvlm import processing_smolvlm
from vision_models import FAMILIES, picture, write_rows

from kit.config.recipe import Recipe
from kit.data.feed.data_ranks import Ranks
from kit.data.feed.feed import GlobalBatch
from kit.data.media import Media
from kit.export.final import write_model
from kit.model.adapters.freeze import parts_of
from kit.model.build import build_model
from kit.model.load_plan import LoadPlan
from kit.model.pretrained.classes import auto_class
from kit.preflight import preflight
from kit.strategy.weights import whole_state
from kit.system.errors import UserError
from kit.train.optim.optim import build_optimizer

ROWS = [[(70, 50)], [], [(70, 50), (120, 60)], [], [(40, 90)], [(30, 30), (200, 60), (70, 50)]]
ALL_PARTS = ["vision", "projector", "language"]


def check(model: Path, data: Path, **changes):
    settings = {"method": "full", "max_length": 1024, "global_batch_size": len(ROWS), "max_steps": 1} | changes
    return preflight.check(Recipe(model_name_or_path=str(model), dataset=str(data), output_dir="unused", **settings))


def first_batch(checked) -> GlobalBatch:
    return checked.data.open_feed(checked.recipe, Ranks(), 0, {}).take(0)


def own_losses(model, images, row, folder: Path) -> tuple[torch.Tensor, list[int]]:
    """The sum of the losses of a row by the family's own processor and forward, and its token ids."""
    processor, (asked, answer) = images.processor, row["messages"]
    pictures = [picture_of(folder / part["path"]) for part in asked["content"] if part["type"] == "image"]
    parts = [{"type": "image"} if part["type"] == "image" else part for part in asked["content"]]
    messages = [{"role": "user", "content": parts}, answer]
    render = processor.tokenizer.apply_chat_template
    text, prompt = render(messages, tokenize=False), render(messages[:1], tokenize=False, add_generation_prompt=True)
    given = {"images": [pictures]} if pictures else {}
    inputs = processor(text=[text], return_tensors="pt", add_special_tokens=False, **given)
    num_asked = len(processor(text=[prompt], add_special_tokens=False, **given)["input_ids"][0])
    labels = inputs["input_ids"].clone()
    labels[:, :num_asked] = -100
    return model(**inputs, labels=labels, use_cache=False).loss * (labels != -100).sum(), inputs["input_ids"][
        0
    ].tolist()


def picture_of(path: Path):
    from PIL import Image

    return Image.open(path)


def family_of_tests(family: str, vision_model, monkeypatch) -> Path:
    if family == "smolvlm":  # its processor asks for it, and needs it for videos only
        monkeypatch.setattr(processing_smolvlm, "num2words", object())
    return vision_model(family)


@pytest.mark.parametrize("family", matrix(FAMILIES, always=len(FAMILIES)))
def test_loss_and_gradients_are_those_of_the_family(family, vision_model, tmp_path, monkeypatch):
    model_folder = family_of_tests(family, vision_model, monkeypatch)
    data = write_rows(tmp_path, ROWS)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    reference, expected = None, []
    # Text alone in a micro-batch; several rows; packs; and towers that train.
    for changes in (
        {"per_device_train_batch_size": 1},
        {"per_device_train_batch_size": 4},
        {"packing": True, "per_device_train_batch_size": 1, "global_batch_size": 1},
        {"per_device_train_batch_size": 1, "train_only": ALL_PARTS},
    ):
        checked = check(model_folder, data, **changes)
        if reference is None:
            reference = auto_class(checked.config).from_pretrained(model_folder, attn_implementation="sdpa").train()
            for i, row in enumerate(rows):
                loss, ids = own_losses(reference, checked.data.encoder.media, row, tmp_path)
                assert checked.data.train[i][0].tolist() == ids
                loss.backward()
                expected.append(loss.item())
        packing = checked.recipe.packing
        model = build_model(
            checked.recipe, checked.config, LoadPlan(compute_dtype="float32", device="cpu"), packing=packing
        )
        batch = first_batch(checked)
        assert sorted(i for each in batch.micro_batches for *_, i in each.segments) == [*range(len(ROWS))]
        losses = torch.cat([model(**each.model_inputs()) for each in batch.micro_batches])
        losses.sum().backward()
        assert losses.sum().item() == pytest.approx(sum(expected), rel=1e-6)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        towers_train = checked.recipe.train_only is not None
        assert towers_train == any("vision" in name or "visual" in name for name in trained)
        for name, own in reference.named_parameters():
            if name in trained and own.grad is not None:
                bound = 2e-6 * max(own.grad.abs().max().item(), 1.0)
                assert (trained[name].grad - own.grad).abs().max().item() < bound, name


def test_what_is_written_opens_with_its_processor(vision_model, tmp_path):
    data = write_rows(tmp_path, ROWS)
    checked = check(vision_model("qwen2_vl"), data, max_pixels=28 * 28 * 4)
    codec = checked.data.encoder.media
    image = Media("image", b"", False, (500, 500), 0, 0)
    assert sum(map(codec.count, codec.texts([image]))) == 4
    model = build_model(checked.recipe, checked.config, LoadPlan(compute_dtype="float32", device="cpu"))
    final = tmp_path / "final"
    final.mkdir()
    write_model(final, model, whole_state(model), checked.tokenizer, "card", None, pixels=(None, 28 * 28 * 4))
    again = check(final, data)
    assert again.data.encoder.media.key == checked.data.encoder.media.key
    opened = auto_class(checked.config).from_pretrained(final)
    assert all(torch.equal(p, opened.get_parameter(name)) for name, p in model.named_parameters())


def test_an_image_is_not_cut_and_a_row_that_is_too_long_is_counted(vision_model, tmp_path):
    data = write_rows(tmp_path, [[(30, 30)], [(300, 300)] * 4])
    checked = check(vision_model("qwen2_vl"), data, max_length=40, global_batch_size=1)
    assert len(checked.data.train) == 1
    assert any("1 of 2 samples left out: longer than 40 tokens, and with images" in note for note in checked.notes)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("qwen2_vl", "size", {"shortest_edge": 10**12, "longest_edge": 10**12}),
        ("llava", "crop_size", {"height": 10**5, "width": 10**5}),
        ("internvl", "max_patches", 10**6),
        ("idefics3", "max_image_size", {"longest_edge": 1}),
    ],
)
def test_a_processor_that_would_fill_the_memory_is_refused(family, name, value, vision_model, tmp_path):
    model = shutil.copytree(vision_model(family), tmp_path / "model")
    file = model / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(UserError, match=f"its image processor has {name}"):
        check(model, write_rows(tmp_path, ROWS))


def test_images_that_the_model_takes_for_one_are_refused_with_their_row(vision_model, tmp_path):
    """Its positions are those of runs of placeholders, which only the tokens around an image part."""
    model = shutil.copytree(vision_model("qwen2_vl"), tmp_path / "model")
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(
        template.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>")
    )
    data = write_rows(tmp_path, [[(70, 50), (120, 60)]])
    row = json.loads(data.read_text())
    row["messages"][0]["content"] = [part for part in row["messages"][0]["content"] if part["type"] == "image"]
    data.write_text(json.dumps(row) + "\n")
    checked = check(model, data, global_batch_size=1)
    with pytest.raises(UserError, match=r"train.jsonl:1: Qwen2VLModel finds no positions .* text between the images"):
        first_batch(checked)


@pytest.mark.slow
def test_a_torchvision_that_does_not_fit_torch_is_named_and_not_used(tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [
        sys.executable,
        "-c",
        "from kit.preflight import preflight; from transformers import AutoModelForCausalLM",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = "note: torchvision does not fit this torch (operator torchvision::nms does not exist), and is not used"
    assert done.stdout.startswith(expected) and done.stdout.count("\n") == 1


def test_a_damaged_image_is_a_bad_row_and_not_the_end_of_a_run(vision_model, tmp_path):
    data = write_rows(tmp_path, [[(70, 50)]] * 40)
    content = bytearray((tmp_path / "1-0.png").read_bytes())
    content[len(content) // 2] ^= 255  # in its pixels: the header and the end are whole
    (tmp_path / "1-0.png").write_bytes(content)
    with pytest.raises(UserError, match=r"train.jsonl:2 images\[0\]: 1-0.png cannot be decoded"):
        check(vision_model("qwen2_vl"), data)
    checked = check(vision_model("qwen2_vl"), data, on_bad_row="skip", global_batch_size=39)
    assert len(checked.data.train) == 39 and len(first_batch(checked).origins) == 39
    stream = {"streaming": True, "shuffle_buffer_size": 4, "on_bad_row": "skip", "global_batch_size": 39}
    checked = check(vision_model("qwen2_vl"), data, **stream)
    (batches,) = {
        tuple(checked.data.open_feed(checked.recipe, Ranks(i, 2), 0, {}, str(tmp_path)).take(0).origins)
        for i in range(2)
    }
    assert len(batches) == 39 and f"{data}:2" not in batches


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<|image_pad|> is this?", "the text itself has it"),
        ("<|image_pad|>", "the text itself has it"),
        ("\ufdd2 is this?", r"U\+FDD2, which stands for an image"),
    ],
)
def test_a_placeholder_that_the_text_itself_has_is_refused(text, found, vision_model, tmp_path):
    data = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "no"}]
    data.write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(UserError, match=found):
        check(vision_model("qwen2_vl"), data)


def test_an_image_that_changes_is_not_trained_on_unseen(vision_model, tmp_path):
    data = write_rows(tmp_path, [[(70, 50)], [(70, 50)]])
    checked = check(vision_model("qwen2_vl"), data, global_batch_size=2)
    fingerprint = checked.data.fingerprint
    picture(7).save(tmp_path / "0-0.png")
    with pytest.raises(UserError, match=r"train.jsonl:1: 0-0.png: changed since its row was read"):
        first_batch(checked)
    assert check(vision_model("qwen2_vl"), data, global_batch_size=2).data.fingerprint != fingerprint


def test_a_stream_has_the_images_of_its_rows_on_every_topology_and_after_every_stop(vision_model, tmp_path):
    data = write_rows(tmp_path, ROWS)
    changes = {"streaming": True, "shuffle_buffer_size": 4, "max_steps": 9, "per_device_train_batch_size": 2}
    checked = check(vision_model("llava"), data, **changes)

    def seen(batches):
        """The features of each image, all rows of which are as large; and of how many micro-batches there are none."""
        found = [image for each in batches for image in each.encoder_inputs.get("pixel_values", ())]
        return sorted(image.sum().item() for image in found), sum(bool(each.dummy_inputs) for each in batches)

    def feeds(world, state):
        return [checked.data.open_feed(checked.recipe, Ranks(i, world), 0, state, str(tmp_path)) for i in range(world)]

    (whole,), shared = feeds(1, {}), feeds(3, {})
    for step in range(6):
        if step == 5:
            resumed = feeds(1, whole.state())[0].take(5)
        batch = whole.take(step)
        images, num_without = seen([each for feed in shared for each in feed.take(step).micro_batches])
        assert seen(batch.micro_batches)[0] == images and len(images) == 7 and num_without
    assert resumed.origins == batch.origins and seen(resumed.micro_batches) == seen(batch.micro_batches)


def test_a_stream_may_begin_with_rows_without_images(vision_model, tmp_path):
    write_rows(tmp_path, [[], []], "a.jsonl"), write_rows(tmp_path, [[(70, 50)]] * 2, "b.jsonl")
    changes = {"streaming": True, "shuffle": True, "max_steps": 9, "global_batch_size": 4, "on_bad_row": "error"}
    checked = check(vision_model("llava"), f"{tmp_path}/[ab].jsonl", **changes)
    batch = checked.data.open_feed(checked.recipe, Ranks(), 0, {}, str(tmp_path)).take(0)
    assert sum(len(each.encoder_inputs.get("pixel_values", ())) for each in batch.micro_batches) == 2


def test_an_image_in_an_answer_is_seen_and_never_a_target(vision_model, tmp_path):
    """What the model is asked to write comes after all images."""
    write_rows(tmp_path, [[(70, 50)], [(120, 60)]])
    turns = [("user", "0-0.png"), ("assistant", "1-0.png"), ("user", ""), ("assistant", "0-0.png")]
    parts = [[{"type": "image", "path": name}] * bool(name) + [{"type": "text", "text": "tea"}] for _, name in turns]
    messages = [{"role": role, "content": content} for (role, _), content in zip(turns, parts, strict=True)]
    (data := tmp_path / "answers.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    folder = vision_model("qwen2_vl")
    checked = check(folder, data, global_batch_size=1)
    train, codec = checked.data.train, checked.data.media
    (batch,) = first_batch(checked).micro_batches
    assert len(batch.encoder_inputs["image_grid_thw"]) == 3
    assert codec.placeholder_ids.isdisjoint(batch.targets[batch.weights > 0].tolist())
    assert codec.placeholder_ids.isdisjoint(train.prompt(0).reference)
    model = build_model(checked.recipe, checked.config, LoadPlan(compute_dtype="float32", device="cpu"))
    own = auto_class(checked.config).from_pretrained(folder, attn_implementation="sdpa").train()
    text = codec.processor.tokenizer.apply_chat_template(messages, tokenize=False)
    pictures = [picture_of(tmp_path / name) for _, name in turns if name]
    inputs = codec.processor(text=[text], images=[pictures], add_special_tokens=False, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == train[0][0].tolist()
    logits = own(**inputs, use_cache=False).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[batch.target_positions], batch.targets, reduction="none")
    assert torch.allclose(model(**batch.model_inputs()), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "adapted"),
    [
        ({}, {"language"}),
        (
            {"train_only": ALL_PARTS, "vision_learning_rate": 1e-6, "projector_learning_rate": 1e-5},
            {"vision", "projector", "language"},
        ),
        ({"train_only": ["vision"], "freeze": ["*.blocks.1.*"]}, {"vision"}),
        ({"lora_target_modules": ["q_proj", r".*merger\.mlp\.[02]"]}, {"projector", "language"}),
    ],
)
def test_adapters_are_on_the_parts_that_are_named_and_train_there(changes, adapted, vision_model, tmp_path):
    checked = check(vision_model("qwen2_5_vl"), write_rows(tmp_path, ROWS), method="lora", **changes)
    model = build_model(checked.recipe, checked.config, LoadPlan(compute_dtype="float32", device="cpu"))
    torch.cat([model(**each.model_inputs()) for each in first_batch(checked).micro_batches]).sum().backward()
    base = model.get_base_model()
    parts = parts_of(base)
    gradients = {name: p.grad for name, p in base.named_parameters() if "lora_B" in name}
    assert {parts[name] for name in gradients} == adapted
    assert all(gradient is not None and gradient.any() for gradient in gradients.values())
    assert any(".blocks.0." in name for name in gradients) == ("vision" in adapted)
    assert any(".blocks.1." in name for name in gradients) == ("vision" in adapted and "freeze" not in changes)
    groups = build_optimizer(model, checked.recipe, 1e-4).param_groups
    rates = {p: group["lr"] for group in groups for p in group["params"]}
    wanted = {part: changes.get(f"{part}_learning_rate", 1e-4) for part in ALL_PARTS}
    assert {name: rates[base.get_parameter(name)] for name in gradients} == {n: wanted[parts[n]] for n in gradients}


def test_saved_adapters_train_where_a_pattern_names_the_weights_they_adapt(vision_model, tmp_path):
    """As new ones do, though their own weights have other names."""
    folder, data = vision_model("qwen2_5_vl"), write_rows(tmp_path, ROWS)
    plan = LoadPlan(compute_dtype="float32", device="cpu")
    first = check(folder, data, method="lora", lora_target_modules=["q_proj", "qkv"])
    build_model(first.recipe, first.config, plan).save_pretrained(tmp_path / "adapter")
    saved = {"method": "lora", "adapter_name_or_path": str(tmp_path / "adapter")}
    chosen = {"train_only": ["vision", "*.layers.0.self_attn.q_proj.weight"], "freeze": ["*.blocks.1.attn.qkv.[bw]*"]}
    checked = check(folder, data, **chosen, **saved)
    model = build_model(checked.recipe, checked.config, plan).get_base_model()
    trained = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"model.visual.blocks.0.attn.qkv", "model.language_model.layers.0.self_attn.q_proj"}
    with pytest.raises(UserError, match=r"train_only: nothing of .*adapter is left to train"):
        check(folder, data, train_only=["*.k_proj.weight"], **saved)


def test_a_part_that_no_row_reaches_is_refused_before_anything_loads(vision_model, tmp_path):
    settings = {"train_only": ALL_PARTS, "method": "lora", "max_length": 1024, "max_steps": 1, "global_batch_size": 2}
    paths = {"dataset": str(write_rows(tmp_path, [[], []])), "output_dir": str(tmp_path / "run")}
    recipe = Recipe(model_name_or_path=str(vision_model("qwen2_5_vl")), **paths, **settings)
    assert wrong(recipe, ONE_PROCESS, "mine") == ["train_only"]


def test_a_pattern_or_a_rate_for_a_part_that_stays_frozen_is_refused(vision_model, tmp_path):
    folder, data = vision_model("qwen2_5_vl"), write_rows(tmp_path, ROWS)
    with pytest.raises(UserError, match=r"'model\.visual\.\*' matches only parameters that stay frozen"):
        check(folder, data, train_only=["model.visual.*", "language"])
    checked = check(folder, data, method="lora", lora_target_modules=["q_proj"], vision_learning_rate=1e-5)
    model = build_model(checked.recipe, checked.config, LoadPlan(compute_dtype="float32", device="cpu"))
    with pytest.raises(UserError, match="vision_learning_rate: given, but nothing of the vision part trains"):
        build_optimizer(model, checked.recipe, 1e-4)


def test_a_family_that_is_not_supported_is_refused_by_name(tmp_path, model_folder):
    data = write_rows(tmp_path, [[(70, 50)]] * 2)
    with pytest.raises(
        UserError,
        match=r"images: given, but this model does not accept images \(at .*\); expected a model that reads images",
    ):
        check(model_folder, data)


def test_a_served_teacher_is_refused_with_images(vision_model, tmp_path):
    changes = {"objective": "distil", "teacher": "x", "teacher_server": "http://x", "teacher_top_k": 1}
    with pytest.raises(UserError, match="images: not supported with a served teacher yet"):
        check(vision_model("qwen2_vl"), write_rows(tmp_path, ROWS), **changes)


def test_kto_takes_images_before_the_answer_alone(vision_model, tmp_path):
    lines = write_rows(tmp_path, [[(70, 50)], [(120, 60)]]).read_text().splitlines()
    asked, answers = zip(*(json.loads(line)["messages"] for line in lines), strict=True)
    rows = [{"prompt": [asked[i]], "completion": [answers[i]], "label": not i} for i in range(2)]
    data = tmp_path / "rated.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = first_batch(check(vision_model("qwen2_vl"), data, objective="kto", global_batch_size=2, method="lora"))
    own, mismatched = ({each.segments[0][2]: each for each in of} for of in (batch.micro_batches, batch.mismatched))
    for i in range(2):
        assert not own[i].dummy_inputs
        for name, values in own[i].encoder_inputs.items():
            assert torch.equal(mismatched[i].encoder_inputs[name], values)
    rows[1]["completion"] += [asked[0], answers[0]]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"rated.jsonl:2 images: one after the first answer"):
        check(vision_model("qwen2_vl"), data, objective="kto", global_batch_size=2, method="lora")


@pytest.mark.parametrize("half", ["chosen", "rejected"])
def test_a_half_of_a_pair_has_no_image_of_its_own(half, vision_model, tmp_path):
    """Both halves would be shown those of the chosen one."""
    write_rows(tmp_path, [[(70, 50)]])
    asked = {"role": "user", "content": [{"type": "image", "path": "0-0.png"}]}
    first, later = ({"role": "assistant", "content": text} for text in ("yes", "no"))
    pair = {"prompt": [asked], "chosen": [first], "rejected": [later]}
    pair[half] = [first, asked, later]
    (data := tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    with pytest.raises(UserError, match=r"pairs.jsonl:1 images: one after the first answer"):
        check(vision_model("qwen2_vl"), data, objective="dpo", global_batch_size=1, method="lora")
