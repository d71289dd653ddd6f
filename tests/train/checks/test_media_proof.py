"""Rows with images that would be trained otherwise than by the model's own code are refused before the first step."""

import random

import audio_models
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from vision_models import write_rows

from kit.config.recipe import Recipe
from kit.data.feed.data_ranks import Ranks
from kit.model.build import build_model
from kit.model.load_plan import LoadPlan
from kit.model.media.codec import ModelMedia
from kit.preflight import preflight
from kit.strategy.accelerator import Prepared
from kit.system.errors import UserError
from kit.train.checks.media_proof import prove_media


@pytest.fixture
def prove(vision_model, audio_model, tmp_path):
    """Prove a family on data with ``kinds`` of media, whose model is computed in ``dtype``."""

    def proven(family, packing=True, dtype="float32", kinds=("image",), pads=True):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        settings = {"method": "lora", "max_length": 1024, "global_batch_size": 1, "max_steps": 1, "packing": packing}
        folder = str((audio_model if "audio" in kinds else vision_model)(family))
        files = write_rows(tmp_path, [[(70, 50)]]), audio_models.write_rows(tmp_path, [[0.5]], "audio.jsonl")
        data = [str(files[kind == "audio"]) for kind in kinds]
        checked = preflight.check(Recipe(model_name_or_path=folder, dataset=data, output_dir="unused", **settings))
        plan = LoadPlan(compute_dtype=dtype, device="cpu")
        model = build_model(checked.recipe, checked.config, plan, packing=packing).train()
        accelerator = Accelerator(cpu=True, mixed_precision="no" if dtype == "float32" else "bf16")
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        numbers = draw()
        prepared = Prepared(accelerator, Ranks(), accelerator.prepare_model(model), None, None)
        prove_media(prepared, checked.data.encoder, checked.data.media, packing, pads)
        assert draw() == numbers and model.training
        assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())

    yield proven
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def draw() -> tuple[float, float, float]:
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    numbers = random.random(), np.random.rand(), torch.rand(1).item()
    random.setstate(state[0]), np.random.set_state(state[1]), torch.set_rng_state(state[2])
    return numbers


# Positions on several axes; images that attend in both directions; texts that depend on the row, and on what is beside.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "llava_onevision", "idefics2"])
def test_a_family_that_is_trained_as_by_its_own_code_is_accepted_and_nothing_is_left(family, dtype, prove):
    prove(family, dtype=dtype)


# Sounds alone, whose features are padded in a batch or have a window; and images and sounds in a row.
@pytest.mark.parametrize(
    ("family", "kinds"), [("qwen2_audio", ["audio"]), ("voxtral", ["audio"]), ("gemma4", ["image", "audio"])]
)
def test_sounds_and_both_kinds_together_are_accepted(family, kinds, prove):
    prove(family, kinds=kinds)


def test_sounds_that_padding_changes_are_refused_in_padded_rows_alone(prove):
    pytest.importorskip("torchaudio")  # which its processor needs
    prove("granite_speech", packing=False, kinds=["audio"], pads=False)
    with pytest.raises(
        UserError, match=r"(?s)audio: losses of padded rows differ by .*--per_device_train_batch_size 1"
    ):
        prove("granite_speech", packing=False, kinds=["audio"])


def changed(monkeypatch, change):
    plain = ModelMedia.inputs

    def inputs(self, input_ids, segments, images):
        found = plain(self, input_ids, segments, images)
        return found | change(found)

    monkeypatch.setattr(ModelMedia, "inputs", inputs)


WRONG = {
    "images of each other": (
        "llava",
        lambda found: {"encoder_inputs": {name: each.flip(0) for name, each in found["encoder_inputs"].items()}},
    ),
    "no image": ("llava", lambda found: {"encoder_inputs": {}}),
    "positions of text": (
        "qwen2_vl",
        lambda found: {
            "token_inputs": {name: each[:1].expand(4, -1, -1) for name, each in found["token_inputs"].items()}
        },
    ),
    "no attention to later patches": ("gemma3", lambda found: {"token_inputs": {}}),
}


@pytest.mark.parametrize(("wrong", "dtype"), [*((wrong, "float32") for wrong in WRONG), ("no image", "bfloat16")])
def test_what_is_computed_otherwise_is_refused_with_the_figure(wrong, dtype, prove, monkeypatch):
    family, change = WRONG[wrong]
    changed(monkeypatch, change)
    with pytest.raises(UserError, match=r"losses of a row differ by .*, and gradients by .*, from those of"):
        prove(family, packing=False, dtype=dtype)


def test_tokens_that_the_processor_would_not_make_are_refused(prove, monkeypatch):
    plain = ModelMedia.texts
    monkeypatch.setattr(ModelMedia, "texts", lambda *given: [text + "?" for text in plain(*given)])
    with pytest.raises(UserError, match=r"the model's processor makes \d+ tokens of a conversation"):
        prove("llava", packing=False)
