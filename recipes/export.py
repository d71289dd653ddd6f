"""Export a model: a checkpoint as final/ would be, a merged adapter, GGUF files, or quantised weights.

python recipes/export.py runs/llama-8b-qlora-single/checkpoints/step-00000040 --output_dir model
python recipes/export.py runs/llama-8b-qlora-single/checkpoints/step-00000040 --output_dir merged --merge
python recipes/export.py runs/llama-8b-qlora-single/final --output_dir merged
python recipes/export.py runs/llama-8b-qlora-single/final --output_dir gguf --format gguf --gguf_type q4_k_m
python recipes/export.py runs/tiny-single/final --output_dir w8a8 --format compressed-tensors --scheme W8A8
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this clone's kit, installed or not

from kit.system import interrupt

if __name__ == "__main__":
    interrupt.leave_on_ctrl_c()  # also while the imports below run

from kit.config.commands import TYPED_AS
from kit.failures import exits
from kit.system.console import Parser, say, silence_libraries
from kit.system.errors import Problem, UserError, raise_if

if TYPE_CHECKING:
    from kit.export.source import Source


def main() -> None:
    """Export a checkpoint, an adapter or a model, and check what was written. Raises ``UserError``."""
    typed = os.environ.get(TYPED_AS)
    about = (__doc__ or "").replace("python recipes/export.py", typed or "python recipes/export.py")
    parser = Parser(prog=typed, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a run, checkpoint, final/, or adapter (which is merged)")
    parser.add_argument("--output_dir", type=Path, required=True, help="new folder for the model")
    parser.add_argument("--merge", action="store_true", help="merge the adapter of a checkpoint into its base")
    parser.add_argument(
        "--format", choices=("safetensors", "gguf", "compressed-tensors"), default="safetensors", help="file format"
    )
    parser.add_argument("--gguf_type", help="one or several of f32, f16, bf16, q8_0, q6_k, q5_k_m, q4_k_m, ...")
    parser.add_argument("--llama_cpp", metavar="FOLDER", help="a clone of llama.cpp; default: $LLAMA_CPP")
    parser.add_argument("--pre_tokenizer", metavar="NAME", help="of llama.cpp, if it does not recognise the model's")
    parser.add_argument(
        "--scheme", help="compressed-tensors: W4A16, W4A8, W8A16, W8A8, FP8_DYNAMIC or NVFP4; default: that of --qat"
    )
    parser.add_argument(
        "--group_size", type=int, metavar="N", help="quantisation group size: weights that share a scale"
    )
    parser.add_argument(
        "--llmcompressor", metavar="FOLDER", help="a virtual environment with llmcompressor; default: $LLMCOMPRESSOR"
    )
    parser.add_argument("--model_name_or_path", help="the base model, if it was moved")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, help="dtype of the weights; default: the base's")
    parser.add_argument(
        "--max_change", type=float, metavar="NATS", help="largest allowed mean change of a token's log-probability"
    )
    parser.add_argument("--trust_remote_code", choices=("true", "false"), default="false", help="run the base's code")
    args = parser.parse_args()
    if os.path.lexists(args.output_dir):
        raise UserError("--output_dir", f"{args.output_dir} exists", "a new folder")

    from kit.export import compressed, gguf

    types = list(dict.fromkeys(each.strip().lower() for each in (args.gguf_type or "f16").split(",")))
    raise_if(_problems(args, types))

    from kit.export.final import describe_serving
    from kit.export.folders import Wanted, new_folder, write_compressed_folder, write_folder, write_gguf_folder
    from kit.export.source import find_source

    interrupt.end_imports()

    silence_libraries()
    opened = find_source(args.source, args.model_name_or_path, args.trust_remote_code)
    if args.format == "compressed-tensors" and args.scheme is None and (run := opened.run) and run.qat:
        args = parser.parse_args([*sys.argv[1:], *compressed.flags_of_qat(run).split()])
        raise_if(_problems(args, types))
    raise_if(_problems_of(args, opened))
    tools = gguf.find_tools(args.llama_cpp, types, args.pre_tokenizer) if args.format == "gguf" else None
    python = compressed.find_llmcompressor(args.llmcompressor) if args.format == "compressed-tensors" else None
    wanted = Wanted(
        args.dtype,
        args.max_change,
        args.output_dir,
        args.merge or args.format != "safetensors",
    )
    model = None
    with new_folder(args.output_dir) as folder:
        if tools is not None:
            what = write_gguf_folder(opened, folder, wanted, tools, types)
        elif python is not None:
            what, model = write_compressed_folder(opened, folder, wanted, python, args.scheme, args.group_size)
        else:
            what, model = write_folder(opened, folder, wanted)
    lines = describe_serving(model, args.output_dir) if model is not None else []
    say(f"{what}: {args.output_dir}", *lines)


def _problems(args: argparse.Namespace, types: list[str]) -> list[Problem]:
    """Return what is wrong with the flags, whatever the source."""
    from kit.export import compressed, gguf

    problems = []
    if args.format != "gguf":
        given = {"--gguf_type": args.gguf_type, "--llama_cpp": args.llama_cpp, "--pre_tokenizer": args.pre_tokenizer}
        problems += [Problem(flag, "only for GGUF", fix="--format gguf") for flag, value in given.items() if value]
    if args.format != "compressed-tensors":
        given = {"--scheme": args.scheme, "--group_size": args.group_size, "--llmcompressor": args.llmcompressor}
        fix = "--format compressed-tensors"
        problems += [
            Problem(flag, f"only for {fix[9:]}", fix=fix) for flag, value in given.items() if value is not None
        ]
    elif args.scheme is not None:
        if args.scheme not in compressed.SCHEMES:
            problems += [Problem("--scheme", f"unknown: {args.scheme}", f"one of {', '.join(compressed.SCHEMES)}")]
        elif args.group_size is not None and args.scheme not in ("W4A16", "W4A8", "W8A16"):
            problems += [Problem("--group_size", f"{args.scheme} has none to choose", fix="leave it out")]
    known = [*gguf.CONVERTED, *gguf.QUANTISED]
    if args.group_size is not None and args.group_size < 2:
        problems += [Problem("--group_size", str(args.group_size), "weights of a row, 2 or more")]
    unknown = [each for each in types if each not in known]
    if unknown:
        problems += [Problem("--gguf_type", f"unknown: {', '.join(unknown)}", f"one or several of {', '.join(known)}")]
    if args.max_change is not None and not args.max_change > 0:
        problems += [Problem("--max_change", f"{args.max_change:g}", "nats per token, above 0")]
    return problems


def _problems_of(args: argparse.Namespace, opened: "Source") -> list[Problem]:
    """Return what does not fit the source."""
    from kit.model.pretrained.dequantise import quantisation_of
    from kit.model.pretrained.heads import head_of

    if opened.is_model and quantisation_of(opened.config):
        fix = "give the model that it was made from"
        return [Problem(str(args.source), "its weights are quantised", "a model with plain weights", fix)]
    is_full = opened.settings.method == "full"
    makes_other = args.format != "safetensors"
    if makes_other and (head := head_of(opened.config)) != "lm":
        return [
            Problem(
                "--format",
                f"{args.format} needs a causal language model, and this one has a head for {head}",
                fix="leave it out",
            )
        ]
    if args.format == "compressed-tensors" and args.scheme is None:
        found = f"missing, and {args.source} was not trained with --qat"
        return [Problem("--scheme", found, fix="--scheme W8A8, or another one of --help")]
    if args.format == "compressed-tensors" and _is_untested(opened):
        found = f"{type(opened.meta_model).__name__} has experts, reads images or audio, or has code of its own"
        return [Problem("--format", found, "a language model with which llmcompressor was tested", "leave it out")]
    if is_full and args.merge:
        return [Problem("--merge", f"{args.source} is a full model's: nothing to merge")]
    if opened.is_model and not makes_other:
        return [Problem(str(args.source), "a full model: nothing to merge", fix="--format gguf, or compressed-tensors")]
    if opened.is_model and args.dtype and args.format == "gguf":
        return [Problem("--dtype", "a full model: --gguf_type says how it is written", fix="leave it out")]
    merges = opened.checkpoint is None or args.merge or makes_other
    if args.dtype and not (is_full or merges):
        return [Problem("--dtype", "nothing is merged", fix="--merge")]
    return []


def _is_untested(opened: "Source") -> bool:
    """Return whether llmcompressor may leave parts of the model as they are, such as experts."""
    from kit.model.adapters.targets import is_router

    has_experts = any(is_router(name) for name, _ in opened.meta_model.named_modules())
    reads_media = opened.config.get_text_config() is not opened.config
    return has_experts or reads_media or opened.settings.trust_remote_code


if __name__ == "__main__":
    with exits.reporting_errors():
        main()
