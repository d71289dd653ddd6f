"""Turn a checkpoint into what final/ would have been after its step, or merge an adapter into its unquantised base.

python recipes/export.py runs/llama-8b-qlora-single/checkpoints/step-00000040 --output_dir model
python recipes/export.py runs/llama-8b-qlora-single/checkpoints/step-00000040 --output_dir merged --merge
python recipes/export.py runs/llama-8b-qlora-single/final --output_dir merged
"""

import argparse
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this clone's kit, installed or not

from kit import interrupt

if __name__ == "__main__":
    interrupt.leave_on_ctrl_c()  # also while the imports below run

from kit.config.scripts import TYPED_AS
from kit.config.settings.method import MethodSettings
from kit.console import Parser, say, silence_libraries
from kit.errors import Problem, UserError, raise_if
from kit.failures import exits


def main() -> None:
    """Export a checkpoint as ``final/`` would be, or merge an adapter. Raises ``UserError``."""
    typed = os.environ.get(TYPED_AS)
    about = (__doc__ or "").replace("python recipes/export.py", typed or "python recipes/export.py")
    parser = Parser(prog=typed, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a run's checkpoint, or an adapter such as final/, which is merged")
    parser.add_argument("--output_dir", type=Path, required=True, help="new folder for the model")
    parser.add_argument("--merge", action="store_true", help="merge the adapter of a checkpoint too")
    parser.add_argument("--model_name_or_path", help="the base, where it is no longer at its own path")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, help="default: bfloat16 when merged; of a full model, its base's")
    parser.add_argument("--measure_drift", action="store_true", help="say how far that moved its answers; slow")
    parser.add_argument("--trust_remote_code", choices=("true", "false"), default="false", help="run the base's code")
    args = parser.parse_args()
    if os.path.lexists(args.output_dir):
        raise UserError(Problem("--output_dir", f"{args.output_dir} exists", "a new folder"))

    from kit.checkpoint.load import read_weights
    from kit.checkpoint.manifest import read_state
    from kit.export import drift
    from kit.export.checkpoint import export_checkpoint, merge_adapter
    from kit.train.loop_state import LoopState

    silence_libraries()
    opened = find_source(args)
    settings, run_file = opened.settings, opened.run_file
    read = None if opened.checkpoint is None else partial(read_weights, path=opened.checkpoint)
    if opened.checkpoint and read and not args.merge:
        flags = {"--measure_drift": args.measure_drift, "--dtype": args.dtype and settings.method != "full"}
        raise_if(Problem(flag, "nothing is merged", fix="--merge") for flag, given in flags.items() if given)
        state = LoopState.from_record(read_state(opened.checkpoint, LoopState().record()))
        export_checkpoint(settings, run_file, state, read, args.output_dir, args.dtype)
        say(f"{'model' if settings.method == 'full' else 'adapter'} after step {state.step}: {args.output_dir}")
        return
    if settings.method == "full":
        raise UserError(Problem("--merge", f"{args.source} is a full model's: nothing to merge"))
    if args.measure_drift and not run_file.is_file():
        found = f"{args.source} is not in the folder of its run: no {run_file}, which says how it was trained"
        fix = "give the run's own final/, or a checkpoint of it with --merge"
        raise UserError(Problem("--measure_drift", found, fix=fix))
    trained = drift.measure_trained(settings, run_file, read) if args.measure_drift else None
    merged = merge_adapter(settings, run_file, read, args.output_dir, args.dtype or "bfloat16")
    if trained:
        say(drift.describe_drift(trained, merged))
    say(f"merged model: {args.output_dir}")


@dataclass(frozen=True)
class Source:
    """What is exported."""

    settings: MethodSettings  # they open the base with its adapter
    checkpoint: Path | None  # to load into that model; None: an adapter, which ``settings`` open themselves
    run_file: Path  # ``run.json`` of the run; an adapter may have none


def find_source(args: argparse.Namespace) -> Source:
    """Find out what ``args.source`` is, and how to open it. Raises ``UserError`` if it is neither of the two."""
    from kit.checkpoint.manifest import MANIFEST
    from kit.model.locate import base_of_adapter, hint_final
    from kit.run.record import with_model_of_checkpoint

    source = Path(os.path.realpath(args.source))
    base = args.model_name_or_path
    # Weights are read and merged, or a few sequences computed, so the kernel of attention does not matter.
    how = {"attn_implementation": "eager", "trust_remote_code": args.trust_remote_code}
    if os.path.isfile(source / "adapter_config.json"):
        base = base or base_of_adapter(source, "give the base: --model_name_or_path BASE")
        names = {"model_name_or_path": base, "adapter_name_or_path": str(source)}
        return Source(MethodSettings.model_validate(names | how), None, source.parent / "run.json")
    if not os.path.isfile(source / MANIFEST):
        is_full = os.path.isfile(source / "config.json")
        found = "a full model: nothing to merge" if is_full else f"no {MANIFEST}, no adapter_config.json"
        expected = "a complete checkpoint, or final/ of a lora or qlora run"
        raise UserError(Problem(str(args.source), found, expected, hint_final(args.source)))
    settings = MethodSettings.model_validate({"model_name_or_path": base or str(source)} | how)
    settings = with_model_of_checkpoint(settings, source, "checkpoint", base)
    return Source(settings, source, source.parents[1] / "run.json")


if __name__ == "__main__":
    with exits.reporting_errors():
        main()
