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
from kit.model.pretrained.dequantise import describe_dequantised, plain_config
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
def written(model_folder, tmp_path):
    """Two folders: the model's with layers that ``quantised`` makes, and one with the weights that these stand for."""

    def written(config, quantised, **changed):
        folder, plain = tmp_path / "quantised", tmp_path / "plain"
        files, meant = load_file(model_folder / "model.safetensors"), {}
        for number, (name, weight) in enumerate(list(files.items())):
            meant[name] = weight.float()
            if name.endswith("proj.weight"):
                parts, meant[name] = quantised(files.pop(name).float(), torch.Generator().manual_seed(number))
                files |= {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
        meant = {name: each.contiguous() for name, each in meant.items()}
        for each, tensors in ((folder, files | changed), (plain, meant)):
            shutil.copytree(model_folder, each)
            tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
            save_file(tensors, each / "model.safetensors", {"format": "pt"})
        with_config(folder, config)
        return folder, plain

    return written


@pytest.fixture
def in_fp8(written):
    """See ``written``: layers in FP8."""

    def in_fp8(block, **changed):
        height, width = block or (1 << 20, 1 << 20)

        def quantised(weight, generator):
            grid = (-(-weight.shape[0] // height), -(-weight.shape[1] // width))
            scales = torch.rand(grid, generator=generator) * 1e-2 + 1e-3
            each = grown(scales, weight.shape, (height, width))
            values = (weight / each).to(torch.float8_e4m3fn)
            return {
                "weight": values,
                "weight_scale_inv": scales if block else scales.reshape(()),
            }, values.float() * each

        unused = {"model.layers.0.mlp.up_proj.activation_scale": torch.tensor(7.0)}
        return written(FP8 | {"weight_block_size": block and list(block)}, quantised, **unused, **changed)

    return in_fp8


def packed(numbers, bits):
    """Numbers ``[rows, n]`` in int32, one after another, the lowest bits first."""
    ones = numbers.long()[..., None] >> torch.arange(bits) & 1
    ones = torch.nn.functional.pad(ones.flatten(1), (0, -numbers.shape[1] * bits % 32)).unflatten(1, (-1, 32))
    return (ones << torch.arange(32)).sum(-1).to(torch.int32)


def drawn(weight, generator, bits, size, lowest=0):
    """Values of a weight, and zero points and scales of groups of ``size`` inputs, for each input too."""
    shape, (low, high) = (weight.shape[0], weight.shape[1] // size), (lowest, lowest + (1 << bits))
    values = torch.randint(low, high, weight.shape, generator=generator)
    zeros = torch.randint(low, high, shape, generator=generator)
    return values, zeros, torch.rand(shape, generator=generator) * 1e-2 + 1e-3


def in_gptq(bits, size, less, by_activation=False):
    def quantised(weight, generator):
        values, zeros, scales = drawn(weight, generator, bits, size)
        groups = torch.arange(weight.shape[1]) // size
        if by_activation:
            groups = groups[torch.randperm(len(groups), generator=generator)]
        words = packed(zeros.T - less & 7, bits) if bits == 3 else packed(zeros.T, bits)
        if bits != 3:  # as GPTQModel does: a zero point of 0 borrows from the next
            words -= less * sum(1 << i for i in range(0, 32, bits))
        parts = {"qweight": packed(values, bits).T, "qzeros": words, "scales": scales.T, "g_idx": groups.int()}
        return parts, (values - zeros[:, groups]) * scales[:, groups]

    return quantised


def in_awq(weight, generator):
    values, zeros, scales = drawn(weight, generator, 4, 16)
    order = (torch.arange(len(weight)).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]]).flatten()  # of the kernel
    parts = {"qweight": packed(values.T[:, order], 4), "qzeros": packed(zeros.T[:, order], 4), "scales": scales.T}
    return parts, (values - zeros.repeat_interleave(16, 1)) * scales.repeat_interleave(16, 1)


def in_compressed(bits, size, zero=True, by_activation=False):
    def quantised(weight, generator):
        values, zeros, scales = drawn(weight, generator, bits, size, -(1 << bits - 1))
        groups = torch.arange(weight.shape[1]) // size
        if by_activation:
            groups = groups[torch.randperm(len(groups), generator=generator)]
        half = 1 << bits - 1
        parts = {"weight_packed": packed(values + half, bits), "weight_shape": torch.tensor(weight.shape)}
        parts |= {"weight_scale": scales, "input_scale": torch.ones(1)}
        parts |= {"weight_zero_point": packed(zeros.T + half, bits).T} if zero else {}
        parts |= {"weight_g_idx": groups.int()} if by_activation else {}
        return parts, (values - zero * zeros[:, groups]) * scales[:, groups]

    return quantised


def in_8_bits(weight, generator):
    values, zeros, scales = drawn(weight, generator, 8, weight.shape[1], -128)
    parts = {"weight": values.to(torch.int8), "weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    return parts, (values - zeros) * scales


def in_float8(weight, _):
    return {"weight": (weight / 0.01).to(torch.float8_e4m3fn), "weight_scale": torch.tensor([0.01])}, (
        (weight / 0.01).to(torch.float8_e4m3fn).float() * 0.01
    )


def in_nvfp4(weight, generator):
    numbers, shape = torch.randint(0, 16, weight.shape, generator=generator), (weight.shape[0], weight.shape[1] // 16)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[numbers & 7] * (1 - 2 * (numbers >> 3))
    scales, whole = torch.rand(shape, generator=generator).to(torch.float8_e4m3fn), torch.tensor([300.0])
    parts = {"weight_packed": (numbers[:, ::2] | numbers[:, 1::2] << 4).byte(), "weight_scale": scales}
    return parts | {"weight_global_scale": whole}, values * (scales.float() / whole).repeat_interleave(16, 1)


GPTQ, AWQ = {"quant_method": "gptq"}, {"quant_method": "awq", "bits": 4, "version": "gemm"}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}, "transform_config": {}}


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
    assert "fp8" in note and describe_dequantised(open_config(other), method) == []


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


@pytest.mark.parametrize(
    ("config", "quantised", "method", "plan"),
    [
        (GPTQ | {"checkpoint_format": "gptq"}, in_gptq(4, 16, 1), "full", FP32),
        (GPTQ, in_gptq(3, 32, 1, by_activation=True), "lora", BF16),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, in_gptq(2, 8, 0, by_activation=True), "full", FP32),
        (GPTQ, in_gptq(8, 32, 1), "full", FP32),
        (AWQ, in_awq, "qlora", BF16),
        (COMPRESSED | {"format": "pack-quantized"}, in_compressed(4, 16), "full", FP32),
        (COMPRESSED | {"format": "pack-quantized"}, in_compressed(3, 32, zero=False), "lora", BF16),
        (COMPRESSED | {"format": "pack-quantized"}, in_compressed(8, 8, by_activation=True), "full", FP32),
        (COMPRESSED | {"format": "int-quantized"}, in_8_bits, "qlora", BF16),
        (COMPRESSED | {"format": "float-quantized"}, in_float8, "full", FP32),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, in_nvfp4, "lora", FP32),
    ],
)
def test_a_quantised_base_is_the_model_that_its_values_stand_for(recipe, written, config, quantised, method, plan):
    mine, other = (recipe(folder, method=method) for folder in written(config, quantised))
    assert problems(mine) == ""
    found, expected = (bits_of(build(each, plan)) for each in (mine, other))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert config["quant_method"] in describe_dequantised(open_config(mine), method)[0]


UP = "model.layers.0.mlp.up_proj."
WEIGHT = UP + "weight"
NUMBERS = torch.zeros(64, 32, dtype=torch.int8)


@pytest.mark.parametrize(
    ("config", "quantised", "changed"),
    [
        (None, None, {WEIGHT + "_scale_inv": None}),
        (None, None, {WEIGHT + "_scale_inv": torch.ones(3, 3)}),
        (None, None, {WEIGHT: torch.zeros(64, 16, dtype=torch.int8)}),
        (GPTQ, in_gptq(4, 16, 1), {UP + "qzeros": None}),
        (GPTQ, in_gptq(4, 16, 1), {UP + "scales": torch.ones(2, 32)}),
        (GPTQ, in_gptq(5, 32, 1), {}),  # GPTQModel packs five bits in another way
        (AWQ, in_awq, {UP + "qweight": torch.zeros(32, 16, dtype=torch.int32)}),  # eight bits
        (AWQ, in_awq, {"model.layers.0.mlp.act.scales": torch.ones(64)}),
        (COMPRESSED | {"format": "pack-quantized"}, in_compressed(4, 16), {WEIGHT + "_shape": torch.tensor([64, 20])}),
        (COMPRESSED | {"format": "int-quantized"}, in_8_bits, {WEIGHT: NUMBERS.float()}),
        (COMPRESSED | {"format": "int-quantized"}, in_8_bits, {UP + "other": NUMBERS}),
    ],
)
def test_weights_that_are_not_what_the_config_says_are_refused_by_name(
    recipe, written, in_fp8, config, quantised, changed
):
    folder, _ = written(config, quantised, **changed) if config else in_fp8((16, 8), **changed)
    with pytest.raises(UserError) as refusal:
        build(recipe(folder), FP32)
    named = next(iter(changed)).rpartition(".")[0] if changed else "model.layers.0."
    assert named in str(refusal.value) and "the model that it was made from" in str(refusal.value)


@pytest.mark.parametrize(
    "config",
    [
        FP8 | {"expert_dtype": "fp4"},
        MXFP4,  # of another family than gpt-oss
        GPTQ | {"checkpoint_format": "gptq_p"},
        GPTQ | {"checkpoint_format": None, "format": "marlin"},
        AWQ | {"version": "gemv"},
        COMPRESSED | {"format": "marlin-24"},
        COMPRESSED | {"format": "pack-quantized", "transform_config": {"config_groups": {"R4": {}}}},
        {"quant_method": "hqq"},
        {"quant_method": ["gptq"]},
    ],
)
def test_settings_of_a_quantisation_that_are_not_known_are_refused_before_weights_are_read(recipe, changed, config):
    assert "a quantised checkpoint" in problems(recipe(changed(quantization_config=config)))


def test_the_name_that_early_files_of_compressed_tensors_have_is_read_too(recipe, changed):
    folder = changed(compression_config={"quant_method": "compressed-tensors", "format": "int-quantized"})
    config = open_config(recipe(folder))
    assert "quantised (compressed-tensors)" in describe_dequantised(config, "full")[0]
    assert not hasattr(plain_config(config), "compression_config")
