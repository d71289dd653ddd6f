"""Where the host's time of a training step goes: the kit's own run of a model whose kernels cost next to nothing.

    python benchmarks/host_time.py --method lora --torch_compile true
    python benchmarks/host_time.py --method full --count              # calls of functions in place of milliseconds

The model is a Llama of 32 layers, 64 wide, on a CPU; a step has one row of 16 tokens. Milliseconds are CPU time of the
thread that runs the loop, the median over the steps; what the machine does beside it moves them by a third. Calls, of
Python and of C, are the same in each run. A GPU has other launches, copies and waits: only the Python is the same.

Each part is without the parts within it. ``gap`` is from the numbers of a step to the first layer of the next one.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]
import finetune  # noqa: E402

import kit.evaluate  # noqa: E402  so that the run finds its modules imported
import kit.run.log  # noqa: E402
import kit.train.step as step_module  # noqa: E402
from kit.data.feed.batches import MicroBatch  # noqa: E402
from kit.data.feed.feed import Feed  # noqa: E402
from kit.run.run import Run  # noqa: E402

WARM_UP = 4  # steps


class Clock:
    """What each part of a step took, in milliseconds or calls."""

    def __init__(self, counts: bool) -> None:
        self.steps: list[Counter[str]] = []
        self._spent: Counter[str] = Counter()
        self._parts = ["rest of the loop"]
        self._gap_began: float | None = None
        self._calls = 0
        self._now: Callable[[], float] = (lambda: self._calls) if counts else (lambda: time.thread_time() * 1e3)
        if counts:
            sys.setprofile(self._count)
        self._since = self._now()

    def _count(self, frame: Any, event: str, arg: Any) -> None:
        self._calls += event in ("call", "c_call")

    def _turn(self) -> None:
        now = self._now()
        self._spent[self._parts[-1]] += now - self._since
        self._since = self._now()

    def timed(self, owner: Any, name: str, part: str, before: Any = None, after: Any = None) -> None:
        """Let the function ``name`` of ``owner`` count as ``part``."""
        plain = getattr(owner, name)

        def function(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._parts.append(part)
            if before:
                before()
            try:
                return plain(*args, **kwargs)
            finally:
                self._turn()
                self._parts.pop()
                if after:
                    after()

        setattr(owner, name, function)

    def begin_gap(self) -> None:
        """The numbers of a step are there, and a step ends."""
        self._gap_began = self._now()
        self.steps.append(self._spent)
        self._spent = Counter()

    def end_gap(self) -> None:
        """A layer begins."""
        if self._gap_began is not None:
            self._spent["gap"] = self._now() - self._gap_began
            self._gap_began = None


def watch(clock: Clock) -> None:
    """Let ``clock`` time the parts of a step."""
    clock.timed(Run, "end_step", "end_step: state, log")
    clock.timed(Feed, "take", "feed.take")
    clock.timed(MicroBatch, "to", "batch to the device")
    clock.timed(LlamaDecoderLayer, "__call__", "layers, forward", before=clock.end_gap)
    clock.timed(LlamaForCausalLM, "__call__", "model beside its layers")
    for name in ("clip_grad_norm", "clear_gradients", "_check_gradients", "set_learning_rate", "seed_everything"):
        clock.timed(step_module, name, name.strip("_"))
    clock.timed(torch.optim.Optimizer, "zero_grad", "clear_gradients")
    plain_read, plain_step = step_module._begin_to_read, step_module.train_step

    def begin_to_read(numbers: torch.Tensor) -> Any:
        plain: Any = plain_read(numbers)
        reader = argparse.Namespace(read=plain)
        clock.timed(reader, "read", "read", after=clock.begin_gap)
        return reader.read

    def train_step(policy: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(policy.optimizer, "is_timed"):
            policy.optimizer.is_timed = True
            clock.timed(policy.optimizer, "step", "optimizer.step")
            clock.timed(policy.accelerator, "backward", "backward")
        return plain_step(policy, *args, **kwargs)

    step_module._begin_to_read, step_module.train_step = begin_to_read, train_step
    clock.timed(step_module, "train_step", "rest of train_step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--count", action="store_true", help="count calls instead of milliseconds")
    parser.add_argument("--layers", type=int, default=32)
    args, flags = parser.parse_known_args()  # the others are the run's
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        AutoTokenizer.from_pretrained(ROOT / "recipes/tiny/model").save_pretrained(folder / "model")
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(num_hidden_layers=args.layers, vocab_size=1024, **sizes)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
        (folder / "data.jsonl").write_text('{"text": "Maria sells honey in Oslo, and bread"}\n' * 64)
        given = {"config": "single", "model_name_or_path": folder / "model", "dataset": folder / "data.jsonl"}
        given |= {"max_length": 16, "global_batch_size": 1, "per_device_train_batch_size": 1, "max_steps": args.steps}
        given |= {"gradient_checkpointing": "false", "output_dir": folder / "run", "optim": "adamw_torch_fused"}
        own = [word for key, value in given.items() for word in (f"--{key}", str(value)) if f"--{key}" not in flags]
        sys.argv = ["finetune.py", *own, *flags]
        torch.set_num_threads(1)
        torch.set_num_threads = lambda number: None  # threads that wait for each other would count as the host's time
        kit.run.log.QUIET_SECONDS = float("inf")  # a slow machine would print more of the steps
        clock = Clock(args.count)
        watch(clock)
        finetune.main()
        sys.setprofile(None)
    steps = clock.steps[WARM_UP:]
    table = {
        part: statistics.median(each[part] for each in steps) for part in dict.fromkeys(k for s in steps for k in s)
    }
    gap = table.pop("gap")
    unit = "calls" if args.count else "ms"
    print(f"{' '.join(flags)}: {unit} of the host a step, median of {len(steps)}")
    for part, value in sorted(table.items(), key=lambda each: -each[1]):
        print(f"  {part:26} {value:10,.3f}")
    print(f"  {'whole step':26} {sum(table.values()):10,.3f}\n  {'gap':26} {gap:10,.3f}")


if __name__ == "__main__":
    main()
