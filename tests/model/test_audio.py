"""Models of audio and text match their own processor and forward pass, padded and packed."""

import base64
import json
import shutil
from pathlib import Path

import pytest
import soundfile
import torch
from audio_models import RATE, sound, write_rows
from helpers import matrix

from kit.config.recipe import Recipe
from kit.data.feed.data_ranks import Ranks
from kit.data.feed.feed import GlobalBatch
from kit.model.build import build_model
from kit.model.load_plan import LoadPlan
from kit.model.pretrained.classes import auto_class
from kit.preflight import preflight
from kit.system.errors import UserError

ROWS = [[0.7], [], [0.4, 0.9], [], [0.33], [0.5, 0.25]]
ALL_PARTS = ["audio", "projector", "language"]
# Those whose encoder sees each sound by itself, whatever is beside it.
FAMILIES = ["qwen2_audio", "gemma4", "voxtral", "qwen3_asr"]


def check(model: Path, data: Path, **changes):
    settings = {"method": "full", "max_length": 4096, "global_batch_size": len(ROWS), "max_steps": 1} | changes
    return preflight.check(Recipe(model_name_or_path=str(model), dataset=str(data), output_dir="unused", **settings))


def first_batch(checked) -> GlobalBatch:
    return checked.data.open_feed(checked.recipe, Ranks(), 0, {}).take(0)


def own_losses(model, processor, row, folder: Path) -> tuple[torch.Tensor, list[int]]:
    """The sum of the losses of a row by the family's own processor and forward, and its token ids."""
    asked, answer = row["messages"]
    sounds = [soundfile.read(folder / part["path"], dtype="float32")[0] for part in asked["content"] if "path" in part]
    parts = [{"type": "audio"} if part["type"] == "audio" else part for part in asked["content"]]
    messages = [{"role": "user", "content": parts}, answer]
    render = processor.tokenizer.apply_chat_template
    text, prompt = render(messages, tokenize=False), render(messages[:1], tokenize=False, add_generation_prompt=True)
    if hasattr(processor, "_retrieve_input_features"):  # Voxtral: 375 tokens for each 30 seconds
        text, prompt = (each.replace("[AUDIO]", "[AUDIO]" * 375) for each in (text, prompt))
        options = processor._merge_kwargs(processor.valid_processor_kwargs, tokenizer_init_kwargs={})["audio_kwargs"]
        most = options.pop("max_source_positions")
        heard = {"input_features": processor._retrieve_input_features(sounds, most, **options)} if sounds else {}
    elif sounds:
        made = processor(text=[text, prompt], audio=[*sounds, *sounds], return_tensors="pt", padding=True)
        text, prompt = (
            processor.tokenizer.decode(ids[mask > 0])
            for ids, mask in zip(made["input_ids"], made["attention_mask"], strict=True)
        )
        names = {"input_features", "input_features_mask", "feature_attention_mask"} & made.keys()
        heard = {name: made[name][: len(sounds)] for name in names}
    else:
        heard = {}
    ids, asked_ids = (processor.tokenizer(each, add_special_tokens=False)["input_ids"] for each in (text, prompt))
    input_ids = torch.tensor([ids])
    labels = input_ids.clone()
    labels[:, : len(asked_ids)] = -100
    types = (
        {"mm_token_type_ids": 3 * (input_ids == processor.audio_token_id)}
        if model.config.model_type == "gemma4"
        else {}
    )
    loss = model(input_ids=input_ids, labels=labels, use_cache=False, **heard, **types).loss
    return loss * (labels != -100).sum(), ids


@pytest.mark.parametrize("family", matrix(FAMILIES, always=2))
def test_loss_and_gradients_are_those_of_the_family(family, audio_model, tmp_path):
    data = write_rows(tmp_path, ROWS)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    reference, expected = None, []
    # Text alone in a micro-batch; several rows; packs; and encoders that train.
    for changes in (
        {"per_device_train_batch_size": 1},
        {"per_device_train_batch_size": 3},
        {"packing": True, "per_device_train_batch_size": 1, "global_batch_size": 1},
        {"per_device_train_batch_size": 1, "train_only": ALL_PARTS},
    ):
        checked = check(audio_model(family), data, **changes)
        if reference is None:
            reference = auto_class(checked.config).from_pretrained(audio_model(family)).train()
            for i, row in enumerate(rows):
                loss, ids = own_losses(reference, checked.data.encoder.media.only({"audio"}).processor, row, tmp_path)
                assert checked.data.train[i][0].tolist() == ids
                loss.backward()
                expected.append(loss.item())
        plan = LoadPlan(compute_dtype="float32", device="cpu")
        model = build_model(checked.recipe, checked.config, plan, packing=checked.recipe.packing)
        batch = first_batch(checked)
        assert sorted(i for each in batch.micro_batches for *_, i in each.segments) == [*range(len(ROWS))]
        losses = torch.cat([model(**each.model_inputs()) for each in batch.micro_batches])
        losses.sum().backward()
        assert losses.sum().item() == pytest.approx(sum(expected), rel=1e-6)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert (checked.recipe.train_only is not None) == any("audio_tower" in name for name in trained)
        for name, own in reference.named_parameters():
            if name in trained and own.grad is not None:
                bound = 4e-5 * max(own.grad.abs().max().item(), 1.0)
                assert (trained[name].grad - own.grad).abs().max().item() < bound, name


def forms(folder: Path) -> dict[str, dict]:
    """Rows that say the same."""
    content = (folder / "a.wav").read_bytes()
    encoded, samples = base64.b64encode(content).decode(), sound(0, 0.5).tolist()
    answer = {"role": "assistant", "content": "tea"}

    def part(**of_part) -> dict:
        asked = [of_part, {"type": "text", "text": "what?"}]
        return {"messages": [{"role": "user", "content": asked}, answer]}

    def column(value, text: str = "<audio>what?") -> dict:
        return {"messages": [{"role": "user", "content": text}, answer], "audio": value}

    return {
        "path": part(type="audio", path="a.wav"),
        "Qwen2-Audio's": part(type="audio", audio_url="a.wav"),
        "OpenAI's": part(type="input_audio", input_audio={"data": encoded, "format": "wav"}),
        "vLLM's": part(type="audio_url", audio_url={"url": f"data:audio/wav;base64,{encoded}"}),
        "array": part(type="audio", audio={"array": samples, "sampling_rate": RATE, "path": None}),
        "marked": column(["a.wav"]),
        "unmarked": column("a.wav", "what?"),
        "datasets' bytes": column({"bytes": encoded, "path": "elsewhere.wav"}),
        "datasets' array": column([{"array": samples, "sampling_rate": RATE}]),
        "instruction": {"instruction": "<audio>what?", "output": "tea", "audio": "a.wav"},
    }


def test_every_form_of_a_sound_is_the_same_sample(audio_model, tmp_path):
    soundfile.write(tmp_path / "a.wav", sound(0, 0.5), RATE, subtype="FLOAT")
    seen = {}
    for name, row in forms(tmp_path).items():
        (data := tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        checked = check(audio_model("qwen2_audio"), data, global_batch_size=1)
        (batch,) = first_batch(checked).micro_batches
        assert checked.data.media.placeholder_ids.isdisjoint(batch.targets.tolist())
        seen[name] = batch.input_ids.tolist(), batch.encoder_inputs["input_features"].sum().item()
    assert len({str(each) for each in seen.values()}) == 1, seen


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [(1.3, "1.3 seconds: the model's processor would cut its end off"), (0.02, "0.02 seconds: too short")],
)
def test_a_sound_is_not_cut(seconds, reason, audio_model, tmp_path):
    data = write_rows(tmp_path, [[0.5], [seconds]])
    with pytest.raises(UserError, match=rf"train.jsonl:2 audio\[0\]: {reason}"):
        check(audio_model("qwen2_audio"), data)


def test_audio_is_refused_by_models_that_read_none_and_video_by_all(audio_model, vision_model, model_folder, tmp_path):
    data = write_rows(tmp_path, [[0.5]] * 2)
    for folder in (model_folder, vision_model("qwen2_vl")):
        with pytest.raises(UserError, match=r"accept audio \(at .*:1 and 1 more\); expected a model that reads audio"):
            check(folder, data)
    row = {
        "messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "tea"}],
        "video": "a.mp4",
    }
    data.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="media other than text, images and audio"):
        check(audio_model("qwen2_audio"), data)


@pytest.mark.parametrize(
    ("name", "value"), [("n_fft", 10**9), ("feature_size", 10**9), ("chunk_length", 10**9), ("hop_length", 0)]
)
def test_an_audio_processor_that_would_fill_the_memory_is_refused(name, value, audio_model, tmp_path):
    model = shutil.copytree(audio_model("qwen2_audio"), tmp_path / "model")
    settings = json.loads((model / "processor_config.json").read_text())
    settings["feature_extractor"][name] = value
    (model / "processor_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=f"its audio processor has {name} {value}"):
        check(model, write_rows(tmp_path, [[0.5]] * 2))
