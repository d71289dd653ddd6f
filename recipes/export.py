"""Merge a trained adapter into its base: one plain model folder that needs no peft.

python recipes/export.py runs/llama-8b-qlora-single/final --output_dir merged
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this clone's kit, installed or not

from kit import launch
from kit.errors import Problem, UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path, help="folder with adapter_config.json: final/ of a lora or qlora run")
    parser.add_argument("--output_dir", type=Path, required=True, help="new folder for the merged model")
    parser.add_argument("--model_name_or_path", help="the base, where it is no longer at the adapter's own path")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    args = parser.parse_args()
    if not os.path.isfile(args.adapter / "adapter_config.json"):
        is_full = os.path.isfile(args.adapter / "config.json")
        found = "a full model: nothing to merge" if is_full else "no adapter_config.json"
        raise UserError(Problem(str(args.adapter), found, "final/ of a lora or qlora run"))
    if os.path.lexists(args.output_dir):
        raise UserError(Problem("--output_dir", f"{args.output_dir} exists", "a new folder"))

    from kit.export import merge_adapter
    from kit.log import silence_libraries

    silence_libraries()
    merge_adapter(args.adapter, args.output_dir, args.model_name_or_path, args.dtype)
    print(f"merged model: {args.output_dir}")


if __name__ == "__main__":
    with launch.reporting_errors():
        main()
