"""Where the host's time of a training step goes: the kit's own run of a model whose kernels cost next to nothing.

    python benchmarks/host_time.py --method lora --torch_compile true
    python benchmarks/host_time.py --method full --count              # calls of functions in place of milliseconds

A Llama of 32 layers, 64 wide, on a CPU; a step has one row of 16 tokens. Milliseconds are CPU time of the thread that
runs the loop, the median over the steps; what the machine does beside it moves them by a third. Calls, of Python and of
C, are the same in each run. A GPU has other launches, copies and waits: only the Python is the same.

Each part is without the parts within it. ``gap`` is from the numbers of a step to the first layer of the next one.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]
import finetune  # noqa: E402

import kit.run.log  # noqa: E402
import kit.train.step as of_step  # noqa: E402
from kit.data.feed.batches import MicroBatch  # noqa: E402
from kit.data.feed.feed import Feed  # noqa: E402
from kit.run.run import Run  # noqa: E402

WARM_UP = 4  # steps
PARTS = "clip_grad_norm clear_gradients _check_gradients set_learning_rate seed_everything train_step".split()


class Clock:
    """What each part of a step takes, in milliseconds or calls."""

    def __init__(self, counts: bool) -> None:
        self.steps: list[Counter[str]] = []
        self._step: Counter[str] = Counter()
        self._parts = ["rest of the loop"]
        self._in_gap = False
        self._counts, self._calls = counts, 0
        self._since = 0.0
        if counts:
            sys.setprofile(self._count)

    def _count(self, frame: Any, event: str, arg: Any) -> None:
        self._calls += event in ("call", "c_call")

    def _now(self) -> float:
        return self._calls if self._counts else time.thread_time() * 1e3

    def _turn(self) -> None:
        """Count what passed since the last turn as the part that runs."""
        passed = self._now() - self._since
        self._step[self._parts[-1]] += passed
        if self._in_gap:
            self._step["gap"] += passed
        self._since = self._now()

    def timed(self, owner: Any, name: str, part: str) -> None:
        """Let the function ``name`` of ``owner`` count as ``part``."""
        plain = getattr(owner, name)

        def function(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._parts.append(part)
            self._in_gap &= part != "layers, forward"
            try:
                return plain(*args, **kwargs)
            finally:
                self._turn()
                self._parts.pop()
                if part == "read":  # the numbers of a step are there, and with them the step ends
                    self.steps.append(self._step)
                    self._step, self._in_gap = Counter(), True

        setattr(owner, name, function)


def watch(clock: Clock) -> None:
    """Let ``clock`` time the parts of a step."""
    clock.timed(Run, "end_step", "end_step: state, log")
    clock.timed(Feed, "take", "feed.take")
    clock.timed(MicroBatch, "to", "batch to the device")
    clock.timed(LlamaDecoderLayer, "__call__", "layers, forward")
    clock.timed(LlamaForCausalLM, "__call__", "model beside its layers")
    plain_read, plain_step = of_step._begin_to_read, of_step.train_step

    def begin_to_read(numbers: torch.Tensor) -> Any:
        reader = argparse.Namespace(read=plain_read(numbers))
        clock.timed(reader, "read", "read")
        return reader.read

    def train_step(policy: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(policy.optimizer, "is_timed"):
            policy.optimizer.is_timed = True
            clock.timed(policy.optimizer, "step", "optimizer.step")
            clock.timed(policy.accelerator, "backward", "backward")
        return plain_step(policy, *args, **kwargs)

    of_step._begin_to_read, of_step.train_step = begin_to_read, train_step
    for name in PARTS:
        clock.timed(of_step, name, "rest of train_step" if name == "train_step" else name.strip("_"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--count", action="store_true", help="count calls instead of milliseconds")
    args, flags = parser.parse_known_args()  # the others are the run's
    torch.set_num_threads(1)
    torch.set_num_threads = lambda number: None  # threads that wait for each other would count as the host's time
    kit.run.log.QUIET_SECONDS = float("inf")  # a slow machine would print more of the steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        AutoTokenizer.from_pretrained(ROOT / "recipes/tiny/model").save_pretrained(folder / "model")
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(num_hidden_layers=args.layers, vocab_size=1024, **sizes)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
        (folder / "data.jsonl").write_text('{"text": "Maria sells honey in Oslo, and bread"}\n' * 64)
        own = f"--config single --model_name_or_path {folder}/model --dataset {folder}/data.jsonl --max_length 16"
        own += f" --global_batch_size 1 --gradient_checkpointing false --max_steps {args.steps}"
        sys.argv = ["finetune.py", *own.split(), "--output_dir", str(folder / "run"), *flags]
        clock = Clock(args.count)
        watch(clock)
        finetune.main()
        sys.setprofile(None)
    steps = clock.steps[WARM_UP:-1]
    parts = {part: statistics.median(each[part] for each in steps) for part in steps[0]}
    gap = parts.pop("gap")
    print(f"{' '.join(flags)}: {'calls' if args.count else 'ms'} of the host a step, median of {len(steps)}")
    rows = sorted(parts.items(), key=lambda each: -each[1])
    for part, value in [*rows, ("all", sum(parts.values())), ("gap", gap)]:
        print(f"  {part:26} {value:10,.3f}")


if __name__ == "__main__":
    main()
