import json
import shutil
from dataclasses import replace

import pytest
import torch
from model_helpers import BF16, FP32, build, problems
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from benchmarks.tiny_families import tiny_config
from kit.model.build import open_config
from kit.model.pretrained.dequantise import describe_dequantised
from kit.system.errors import UserError

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def with_config(folder, quantisation):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))


def grown(scales, shape, block):
    """The scale of each value of a weight of ``shape``: that of its block, of which the last ones are cut."""
    rows, columns = (torch.arange(size) // side for size, side in zip(shape, block, strict=True))
    return scales[rows][:, columns]


@pytest.fixture
def in_fp8(model_folder, tmp_path):
    """Two folders: the model's with layers in FP8, and one with the weights that these stand for, in float32."""

    def in_fp8(block, **changed):
        quantised, plain = tmp_path / "quantised", tmp_path / "plain"
        files, meant = load_file(model_folder / "model.safetensors"), {}
        height, width = block or (1 << 20, 1 << 20)
        for name, weight in list(files.items()):
            meant[name] = weight.float()
            if not name.endswith("proj.weight"):
                continue
            grid = (-(-weight.shape[0] // height), -(-weight.shape[1] // width))
            scales = torch.rand(grid, generator=torch.Generator().manual_seed(len(name))) * 1e-2 + 1e-3
            each = grown(scales, weight.shape, (height, width))
            files[name] = (weight.float() / each).to(torch.float8_e4m3fn)
            files[name + "_scale_inv"] = scales if block else scales.reshape(())
            meant[name] = files[name].float() * each
        files["model.layers.0.mlp.up_proj.activation_scale"] = torch.tensor(7.0)
        for folder, tensors in ((quantised, files | changed), (plain, meant)):
            shutil.copytree(model_folder, folder)
            tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with_config(quantised, FP8 | {"weight_block_size": block and list(block)})
        return quantised, plain

    return in_fp8


@pytest.fixture
def in_mxfp4(model_folder, tmp_path):
    """A small gpt-oss with experts in MXFP4."""
    config = tiny_config("gpt_oss")
    config.vocab_size, config.max_position_embeddings = 320, 256
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    files = {name: tensor.bfloat16() for name, tensor in model.state_dict().items() if not name.endswith("_proj")}
    for name, experts in model.named_parameters():
        if name.endswith("_proj"):
            num_experts, num_in, num_out = experts.shape
            groups = (num_experts, num_out, num_in // 32)
            files[f"{name}_blocks"] = torch.randint(256, (*groups, 16), dtype=torch.uint8)
            files[f"{name}_scales"] = torch.randint(115, 123, groups, dtype=torch.uint8)
    folder = tmp_path / "oss"
    shutil.copytree(model_folder, folder)
    save_file(files, folder / "model.safetensors", {"format": "pt"})
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(folder)
    with_config(folder, MXFP4)
    return folder


def bits_of(model):
    return {name: each.contiguous().view(torch.uint8) for name, each in model.state_dict().items() if each.dim()}


@pytest.mark.parametrize(
    ("block", "method", "plan"),
    [((16, 8), "full", BF16), ((24, 20), "lora", BF16), ((24, 20), "qlora", BF16), (None, "lora", FP32)],
)
def test_a_base_of_fp8_is_the_model_that_its_weights_and_scales_stand_for(recipe, in_fp8, block, method, plan):
    quantised, plain = in_fp8(block)
    mine, other = (recipe(folder, method=method) for folder in (quantised, plain))
    assert problems(mine) == ""
    model = build(mine, plan)
    found, expected = bits_of(model), bits_of(build(other, plan))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert method == "qlora" or not hasattr(model.config, "quantization_config")
    (note,) = describe_dequantised(open_config(mine), method)
    assert "FP8" in note and describe_dequantised(open_config(other), method) == []


@pytest.mark.parametrize(("method", "plan"), [("full", FP32), ("lora", BF16)])
def test_experts_of_mxfp4_are_read_as_by_transformers(recipe, in_mxfp4, method, plan):
    mine = recipe(in_mxfp4, method=method)
    assert problems(mine) == ""
    model = build(mine, plan)
    theirs = AutoModelForCausalLM.from_pretrained(
        in_mxfp4, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    of_ours, of_theirs = (each.get_decoder().layers[0].mlp.experts for each in (model, theirs))
    for name in ("gate_up_proj", "down_proj"):
        found, expected = getattr(of_ours, name), getattr(of_theirs, name)
        assert found.dtype == (torch.float32 if method == "full" else torch.bfloat16)
        assert torch.equal(found.float(), expected) and expected.any()


@pytest.mark.parametrize("plan", [BF16, FP32])
def test_qlora_trains_on_the_mxfp4_of_the_files(recipe, in_mxfp4, plan):
    options = {"lora_target_modules": ["all-linear", "experts.gate_up_proj", "experts.down_proj"], "method": "qlora"}
    mine = recipe(in_mxfp4, **options)
    assert problems(mine) == ""
    (note,) = describe_dequantised(open_config(mine), "qlora")
    assert "MXFP4, and stay so" in note
    plain = build(recipe(in_mxfp4, method="lora"), plan).get_decoder().layers[0].mlp.experts
    model, empty = build(mine, plan), build(mine, replace(plan, reads_weights=False))
    assert [(n, p.shape) for n, p in model.named_parameters()] == [(n, p.shape) for n, p in empty.named_parameters()]
    ours = model.get_decoder().layers[0].mlp.experts.get_base_layer()
    for name in ("gate_up_proj", "down_proj"):
        packed, wanted = getattr(ours, name), getattr(plain, name)
        assert packed.weight.numel() * packed.weight.element_size() == wanted.numel() * 17 // 32
        found = packed.dequantiser(packed.weight.view(-1).view(torch.uint8), wanted.dtype)
        assert torch.equal(found(slice(1, 3)), wanted[1:3]) and wanted.any()
    positions = torch.arange(0, 80, 3)
    model(input_ids=torch.arange(80).view(2, 40), target_positions=positions, targets=positions).sum().backward()
    assert all(p.grad.any() for name, p in model.named_parameters() if "lora_B" in name)


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({UP + "_scale_inv": None}, f"{UP} is of 8 bits and has no {UP}_scale_inv"),
        ({UP + "_scale_inv": torch.ones(1, 1)}, f"{UP} of (64, 32) has scales of (1, 1)"),
        ({UP: torch.zeros(64, 16, dtype=torch.int8)}, f"{UP} is of torch.int8"),
        ({UP: torch.zeros(64, 32, dtype=torch.float8_e5m2)}, f"{UP} is of torch.float8_e5m2"),
    ],
)
def test_weights_that_are_not_what_the_config_says_are_refused_by_name(recipe, in_fp8, changed, found):
    quantised, _ = in_fp8((16, 8), **changed)
    with pytest.raises(UserError) as refusal:
        build(recipe(quantised), FP32)
    assert found in str(refusal.value) and "the model that it was made from" in str(refusal.value)


def test_settings_of_a_quantisation_that_are_not_known_are_refused_before_weights_are_read(recipe, in_fp8):
    quantised, _ = in_fp8((16, 8))
    for changed in ({"weight_block_size": [0, 8]}, {"weight_block_size": 8}, {"expert_dtype": "fp4"}):
        with_config(quantised, FP8 | changed)
        assert "a quantised checkpoint" in problems(recipe(quantised)), changed
    with_config(quantised, MXFP4)  # of another family than gpt-oss
    assert "a quantised checkpoint" in problems(recipe(quantised))
