"""What no CPU can check: each function returns figures, and those with a bound must hold. See ``benchmarks/gpu.py``."""

import json
import os
import runpy
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_bench import ROOT, TINY, Bench, Broken, Figure, Skipped, relative_error, train, worst_difference
from torch.nn.attention import SDPBackend, sdpa_kernel

BF16 = 2**-8  # the largest relative error of rounding to bf16
TINY_FLAGS: dict[str, Any] = {
    "recipe": "tiny",
    "max_steps": None,
    "eval_on_start": "false",
    "predict_with_generate": "false",
}


def rates(bench: Bench) -> list[Figure]:
    """What matrix products and copies reach here: the roofline's two numbers, measured."""
    size, elements = (64, 1 << 12) if bench.rehearse else (8192, 1 << 28)
    a, b = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.zeros(elements, device=bench.device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    product, copy = bench.milliseconds(lambda: a @ b), bench.milliseconds(lambda: target.copy_(source))
    return [
        Figure(f"bf16 products of {size:,}", 2 * size**3 / product / 1e9, unit="TFLOP/s"),
        Figure("copies in the GPU's memory", 2 * source.nbytes / copy / 1e6, unit="GB/s"),
    ]


def four_bit(bench: Bench) -> list[Figure]:
    """bitsandbytes' 4-bit product, forward and backward, against the product with its dequantised weights."""
    import bitsandbytes as bnb

    inputs, outputs = (128, 192) if bench.rehearse else (4096, 14336)
    figures = []
    for rows in (1, 3, 64) if bench.rehearse else (1, 3, 4096):  # one row has a kernel of its own
        torch.manual_seed(0)
        layer = bnb.nn.Linear4bit(inputs, outputs, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        layer = layer.to(bench.device)
        x = torch.randn(rows, inputs, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
        arriving = torch.randn(rows, outputs, device=bench.device, dtype=torch.bfloat16)
        y = layer(x)
        y.backward(arriving)
        weight: Any = layer.weight
        plain = bnb.functional.dequantize_4bit(weight.data, weight.quant_state).double()
        figures += [
            Figure(f"{rows} rows: output", relative_error(y, x.double() @ plain.T), at_most=2 * BF16),
            Figure(f"{rows} rows: gradient", relative_error(x.grad, arriving.double() @ plain), at_most=2 * BF16),
        ]
    return figures


def bf16(bench: Bench) -> list[Figure]:
    """Losses of the tiny recipe with bf16 autocast, against those in float32.

    Of the first 15 steps: by step 40 the two differ by a tenth on a CPU as well, where the loss is 0.3 and falls fast.
    """
    steps = 3 if bench.rehearse else 15
    rows = {}
    for precision in ("bf16", "no"):
        text = (ROOT / "accelerate_configs/single.yaml").read_text()
        config = bench.folder / f"single-{precision}.yaml"
        config.write_text(text.replace("mixed_precision: bf16", f'mixed_precision: "{precision}"'))
        rows[precision] = train(bench.folder / f"bf16-{precision}", steps, str(config), **TINY_FLAGS)
    return [Figure(f"{steps} steps: loss", worst_difference(rows["bf16"], rows["no"]), at_most=0.01)]


def varlen(bench: Bench) -> list[Figure]:
    """The kernel of packed attention in bf16, forward and backward, against the loop over samples in float64."""
    from kit.model.layers.attention import _attend_by_kernel, _attend_by_loop, has_kernel

    lengths = [3, 40, 1, 20] if bench.rehearse else [1000, 1, 63, 64, 2040, 928]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=bench.device)
    torch.manual_seed(0)
    heads = (4, 2, 2) if bench.rehearse else (32, 8, 8)
    states = [torch.randn(sum(lengths), num, 128, device=bench.device, dtype=torch.bfloat16) for num in heads]
    arriving = torch.randn_like(states[0])

    def attended(attend: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [state.to(dtype, copy=True).requires_grad_() for state in states]
        out = attend(*inputs, bounds, max(lengths), None)
        return [out, *torch.autograd.grad(out, inputs, arriving.to(dtype))]

    by_kernel = has_kernel(states[0])
    found = attended(_attend_by_kernel if by_kernel else _attend_by_loop, torch.bfloat16)
    exact = attended(_attend_by_loop, torch.float64)
    names = ("output", "gradient of queries", "of keys", "of values")
    how = "kernel" if by_kernel else "loop, there is no kernel here"
    return [
        Figure(f"{how}: {name}", relative_error(a, b), at_most=3 * BF16)
        for name, a, b in zip(names, found, exact, strict=True)
    ]


def masks(bench: Bench) -> list[Figure]:
    """Each backend of sdpa in bf16, causal and with a mask of padding, against its formula in float64.

    cuDNN's gradients with a mask have no bound: they may be NaN where the length is 64 beyond a multiple of 128, and
    the kit turns them off.
    """
    figures = []
    heads, groups = (4, 2) if bench.rehearse else (32, 8)
    for length in (40, 64) if bench.rehearse else (512, 576, 1000):
        torch.manual_seed(0)
        states = [
            torch.randn(2, num, length, 128, device=bench.device, dtype=torch.bfloat16)
            for num in (heads, groups, groups)
        ]
        causal = torch.ones(length, length, dtype=torch.bool, device=bench.device).tril()
        padded = causal.repeat(2, 1, 1, 1)
        padded[1, :, :, length - length // 4 :] = False
        padded[1, :, length - length // 4 :, 0] = True  # a row of padding sees one token, or its softmax is empty
        for masked in (False, True):
            mask = padded if masked else None
            exact = _attention(states, torch.float64, SDPBackend.MATH, padded if masked else causal)
            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                try:
                    found = _attention(states, torch.bfloat16, backend, mask)
                except RuntimeError:  # "No available kernel": this backend takes no mask, or is not for this device
                    continue
                name = f"{backend.name.split('_')[0].lower()}, {length} tokens{', mask' if masked else ''}"
                worst = max(relative_error(a, b) for a, b in zip(found, exact, strict=True))
                unbound = masked and backend is SDPBackend.CUDNN_ATTENTION
                figures.append(Figure(name, worst, at_most=None if unbound else 3 * BF16))
    return figures


def _attention(states: list[torch.Tensor], dtype: torch.dtype, backend: SDPBackend, mask: Any) -> list[torch.Tensor]:
    """Output and gradients of sdpa; without a mask it is causal."""
    inputs = [state.to(dtype, copy=True).requires_grad_() for state in states]
    with sdpa_kernel([backend]):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]


def streams(bench: Bench) -> list[Figure]:
    """Micro-batches that are copied on a stream of their own while the GPU computes are whole when they are used."""
    from kit.data.feed.batches import MicroBatch, on_device

    torch.manual_seed(0)
    busy = torch.randn(*(2 * [64 if bench.rehearse else 4096]), device=bench.device)
    made = []
    for i in range(8 if bench.rehearse else 200):
        ids = torch.randint(0, 2**31, (8, 128 + 8 * (i % 50)))
        flat = torch.arange(ids.numel())
        made.append(
            MicroBatch(
                input_ids=ids, target_positions=flat, targets=ids.flatten(), weights=flat.float(), dataset_ids=flat
            )
        )
    sums = []
    for micro_batch in on_device(made, bench.device):
        busy = (busy @ busy).clamp(-1, 1)  # the next copy begins while this runs
        sums.append(torch.stack([value.double().sum() for value in micro_batch.tensors()]))
    expected = [torch.stack([value.double().sum() for value in each.tensors()]) for each in made]
    wrong = sum(int((found.cpu() != exact).sum()) for found, exact in zip(sums, expected, strict=True))
    return [Figure(f"wrong tensors of {len(made)} micro-batches", wrong, at_most=0)]


def syncs(bench: Bench) -> list[Figure]:
    """How often the host waits for the GPU in a step, beyond the one time that it reads loss and gradient norm."""
    path = bench.folder / "syncs.json"
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    watched = {"KIT_SYNCS": str(path), "PYTHONPATH": search}
    flags = {**TINY_FLAGS, "max_steps": 4, "save_steps": 0, "eval_strategy": "no", "overwrite_output_dir": "true"}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, __file__, "--config", "single", "--output_dir", str(bench.folder / "syncs"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | watched)
    if done.returncode:
        raise Broken((done.stdout + done.stderr)[-2000:])
    steps = json.loads(path.read_text())
    if bench.rehearse:
        raise Skipped(f"{len(steps)} steps ran; only a GPU can make the host wait")
    return [Figure("times in a step", max(steps[2:]), at_most=1)]


def watch_syncs(path: Path) -> None:
    """Run recipes/finetune.py in this process, and write how often each step waited for the GPU."""
    sys.path.insert(0, str(ROOT))
    import kit.train.step

    plain, counts = kit.train.step.train_step, list[int]()
    on_cuda = torch.cuda.is_available()

    def train_step(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if on_cuda:
                torch.cuda.set_sync_debug_mode("warn")
            result = plain(*args, **kwargs)
            if on_cuda:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(each.message) for each in caught))
        path.write_text(json.dumps(counts))
        return result

    kit.train.step.train_step = train_step
    runpy.run_path(str(ROOT / "recipes/finetune.py"), run_name="__main__")


def generation(bench: Bench) -> list[Figure]:
    """Greedy answers with a cache, padded on the left: each token against the logits of a whole pass in float64."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kit.model.layers.attention import without_cudnn_attention

    tokenizer = AutoTokenizer.from_pretrained(TINY / "model")
    lines = (TINY / "eval.jsonl").read_text().splitlines()[: 2 if bench.rehearse else 16]
    texts = [tokenizer.decode(tokenizer(line)["input_ids"][: 8 + 5 * i]) for i, line in enumerate(lines)]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(bench.device)
    start = inputs["input_ids"].shape[1]
    judge = AutoModelForCausalLM.from_pretrained(TINY / "model", dtype=torch.float64)
    figures = []
    for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 0.3)):
        model = AutoModelForCausalLM.from_pretrained(TINY / "model", dtype=dtype).to(bench.device)
        with without_cudnn_attention():
            new = 4 if bench.rehearse else 32
            output = model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        mask = F.pad(inputs["attention_mask"], (0, new), value=1).cpu()
        with torch.no_grad():
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            logits = judge(output.cpu(), attention_mask=mask, position_ids=positions).logits[:, start - 1 : -1]
        logits[..., tokenizer.eos_token_id] = -torch.inf  # as ``min_new_tokens`` does
        chosen = logits.gather(2, output[:, start:, None].cpu())[..., 0]
        name = str(dtype).removeprefix("torch.")
        worst = (logits.amax(-1) - chosen).max().item()
        figures.append(Figure(f"{name}: logit of a token below the best one", worst, at_most=bound))
    return figures


def collectives(bench: Bench) -> list[Figure]:
    """DDP and FSDP2 on two GPUs against one, in float32, full: NCCL's sums and gathers."""
    bench.needs_gpus(2)
    return _beside_one_process(bench, "full", (("ddp", 2), ("fsdp", 2)), at_most=1e-5)


def qlora_fsdp2(bench: Bench) -> list[Figure]:
    """``qlora`` under FSDP2 on two GPUs against one, in float32."""
    bench.needs_gpus(2)
    return _beside_one_process(bench, "qlora", (("fsdp", 2),), at_most=1e-4)


def packs_compiled(bench: Bench) -> list[Figure]:
    """Compiled layers with packs under DDP and FSDP2 on two GPUs against one, in float32, ``lora``."""
    bench.needs_gpus(2)
    flags = {"packing": "true", "torch_compile": "true"}
    return _beside_one_process(bench, "lora", (("ddp", 2), ("fsdp", 2)), at_most=1e-5, **flags)


def _beside_one_process(bench: Bench, method: str, topologies: Any, at_most: float, **more: Any) -> list[Figure]:
    """The largest relative difference of a loss between each topology and one process; TF32 would hide the sums."""
    steps = 2 if bench.rehearse else 20
    rows = {}
    for config, num_processes in (("single", 1), *topologies):
        flags = TINY_FLAGS | {"method": method, "global_batch_size": 8, "per_device_train_batch_size": 4} | more
        output = bench.folder / "-".join([method, config, *more])
        rows[config] = train(output, steps, str(_float32(bench, config)), num_processes, tf32="false", **flags)
    return [
        Figure(f"{config}, {count} processes: loss", worst_difference(rows[config], rows["single"]), at_most=at_most)
        for config, count in topologies
    ]


# Runs whose losses on a GPU are compared with those of the same run on a CPU, all in float32.
ON_BOTH: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "full, packed": {"method": "full", "packing": "true"},
    "full, compiled": {"method": "full", "torch_compile": "true"},
    "lora": {"method": "lora"},
    "dora": {"method": "lora", "use_dora": "true"},
    "oft": {"method": "lora", "adapter_type": "oft"},
    "qlora": {"method": "qlora"},
    "adamw_8bit": {"method": "full", "optim": "adamw_8bit"},
    "paged_adamw_32bit": {"method": "full", "optim": "paged_adamw_32bit"},
    "muon": {"method": "full", "optim": "muon"},
    "dpo": {"recipe": "tiny-dpo", "method": "lora"},
}


def cpu(bench: Bench) -> list[Figure]:
    """The same steps on the GPU and on the CPU, in float32 without TF32: every path's kernels beside the CPU's."""
    config = _float32(bench, "single")

    def difference(named: tuple[str, dict[str, Any]]) -> Figure:
        name, changed = named
        flags = TINY_FLAGS | {"tf32": "false"} | changed
        output = bench.folder / f"cpu-{name.replace(', ', '-')}"
        steps = 2 if bench.rehearse else 10
        there = train(output.with_name(output.name + "-gpu"), steps, str(config), **flags)
        here = train(output, steps, str(config), on_cpu=True, **flags)
        magnifies = name in ("adamw_8bit", "muon")  # a difference of the last bit, by rounding to 8 bits or in bf16
        return Figure(f"{name}: loss", worst_difference(there, here), at_most=None if magnifies else 1e-4)

    cases = list(ON_BOTH.items())
    return _side_by_side(difference, cases[:2] if bench.rehearse else cases)


def resume(bench: Bench) -> list[Figure]:
    """``kit verify-resume``: how many things differ after a kill, bounded by 0 with deterministic kernels."""
    config = bench.folder / "single-bf16.yaml"
    config.write_text((ROOT / "accelerate_configs/single.yaml").read_text())
    cases = [(name, exact) for name in ("full", "qlora") for exact in (True, False)]
    cases += [("adamw_8bit", True), ("dpo", True)]

    def differences(case: tuple[str, bool]) -> Figure:
        name, exact = case
        flags = {"recipe": "tiny", "config": str(config), "deterministic": str(exact).lower()} | ON_BOTH[name]
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "kit.cli.main", "verify-resume", "--steps", "4", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        print(name, exact, done.stdout, done.stderr, flush=True)
        if done.returncode > 1:
            raise Broken((done.stdout + done.stderr)[-2000:])
        how = "deterministic kernels" if exact else "default kernels"
        return Figure(f"{name}, {how}: not exact", done.returncode, at_most=0 if exact else None)

    return _side_by_side(differences, cases[:2] if bench.rehearse else cases)


def answers(bench: Bench) -> list[Figure]:
    """The greedy answers of ``kit chat`` in bf16 and in float32, to the same prompts, of a trained adapter."""
    output = bench.folder / "answers"
    command = [sys.executable, str(ROOT / "recipes/finetune.py"), "--recipe", "tiny", "--config", "single"]
    command += ["--output_dir", str(output), "--overwrite_output_dir", "true", "--method", "lora"]
    _printed([*command, *(("--max_steps", "4") if bench.rehearse else ())])
    rows = [json.loads(line) for line in (TINY / "eval.jsonl").read_text().splitlines()]
    prompts = [row["messages"][0]["content"] for row in rows[: 4 if bench.rehearse else 100]]
    given: dict[str, list[str]] = {}
    for name in ("single", str(_float32(bench, "single"))):
        chat = [sys.executable, "-m", "kit.cli.main", "chat", str(output), "--config", name, "--max_new_tokens", "32"]
        given[name] = _printed(chat, "\n".join(prompts)).splitlines()
    equal = [a == b for a, b in zip(*given.values(), strict=True)]
    return [Figure(f"chat, {len(equal)} answers: the same in bf16 and float32", sum(equal) / len(equal))]


def _printed(command: list[str], typed: str = "") -> str:
    """What a command prints to standard output, with ``typed`` as its input."""
    done = subprocess.run(command, input=typed, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise Broken((done.stdout + done.stderr)[-2000:])
    return done.stdout


def _side_by_side(function: Any, cases: Any) -> list[Figure]:
    """The figures of all cases, side by side: they are small, and none is timed."""
    with ThreadPoolExecutor(max_workers=min(12, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, cases))


def _float32(bench: Bench, name: str) -> Path:
    """An Accelerate config of the kit without mixed precision."""
    text = (ROOT / f"accelerate_configs/{name}.yaml").read_text()
    path = bench.folder / f"{name}-float32.yaml"
    path.write_text(text.replace("mixed_precision: bf16", 'mixed_precision: "no"'))
    return path


CHECKS = {
    "rates": rates,
    "four_bit": four_bit,
    "varlen": varlen,
    "masks": masks,
    "streams": streams,
    "generation": generation,
    "syncs": syncs,
    "bf16": bf16,
    "cpu": cpu,
    "resume": resume,
    "answers": answers,
    "collectives": collectives,
    "qlora_fsdp2": qlora_fsdp2,
    "packs_compiled": packs_compiled,
}

if __name__ == "__main__":
    watch_syncs(Path(os.environ["KIT_SYNCS"]))
