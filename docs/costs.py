"""Writes the table "What each promise costs" in docs/architecture.md: modules of the core, and their lines.

python docs/costs.py

Lines are those of whole files, with comments and docstrings, as ``wc -l`` counts them.
"""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"
BEGIN = "<!-- table of docs/costs.py -->"
END = "<!-- end of table -->"


class Row(NamedTuple):
    """A promise, and the modules or packages that keep it, below ``kit/`` and without ``.py``."""

    promise: str
    modules: str
    without: str  # what a user would lose


ROWS = [
    Row(
        "chat data in the forms that are in use",
        "data/chat/formats data/chat/lists data/chat/messages data/chat/columns data/chat/unused data/chat/shown",
        "rows as they are on the hub; a report of columns and keys that would be ignored",
    ),
    Row(
        "only answers are learned from",
        "data/chat/turns data/chat/tokens data/chat/answers data/chat/beginnings data/chat/stops data/chat/template "
        "data/chat/shipped data/chat/sandbox",
        "supervision by turn with any chat template; the check that the end of an answer is learned",
    ),
    Row(
        "files as data",
        "data/read/text data/read/cells data/read/tables data/read/parts data/read/sources data/read/slices "
        "data/strict_json",
        "JSON, CSV, text and parquet, with the line of each mistake; globs, folders and slices",
    ),
    Row(
        "data of other stores",
        "data/read/remote stores run/mirror",
        "`s3://`, `gs://`, `hf://` and other addresses as data; `--mirror_to`; messages about what a store refuses",
    ),
    Row(
        "the hub",
        "data/read/hub hub run/asking upload",
        "hub ids as data; messages about gated and absent repositories; one request a machine; `--push_to_hub`",
    ),
    Row(
        "data tokenised once",
        "data/open data/samples cache",
        "the cache, without which each start tokenises again; skipping bad rows",
    ),
    Row("streaming", "data/feed/stream data/feed/lanes", "training on data that does not fit on a disk"),
    Row(
        "a step depends on the seed and its number only",
        "data/feed/order data/feed/feistel data/feed/feed data/feed/batches data/feed/ranks data/feed/subsets",
        "exact resumes, and the same global batches on any number of processes",
    ),
    Row(
        "packing, with samples kept apart",
        "data/feed/packing model/attention model/packs train/isolation",
        "short samples without padding; the check that no sample sees another",
    ),
    Row(
        "any causal model of transformers",
        "model/load model/trained_linear model/checkpointing model/activation_offload model/locate model/files "
        "model/tokenizer model/plan "
        "model/classes model/parts model/reach",
        "checks of a model before its weights are read; families with parts that text does not reach",
    ),
    Row(
        "adapters",
        "config/adapter_types model/adapter model/lora_linear model/patterns model/targets model/serving",
        "`lora`, with targets that peft can open again; which adapters servers refuse",
    ),
    Row(
        "bases of FP8 and MXFP4",
        "model/dequantise",
        "training from files of 8 or 4 bits as from the plain model; a refusal of those that cannot be read so",
    ),
    Row("4-bit weights", "model/four_bit", "`qlora`, also where the model does not fit on one GPU"),
    Row(
        "new tokens, and rows that train",
        "model/token_rows model/row_layers model/untrained",
        "`--new_tokens`, `--trainable_tokens`; a refusal of a run that cannot learn to stop",
    ),
    Row("partial training", "model/freeze", "`--freeze` and `--train_only`"),
    Row(
        "the loss head",
        "model/loss_head model/chunks train/head_proof",
        "the memory that logits of all positions take: gigabytes at large vocabularies",
    ),
    Row(
        "the exact loss of the global batch",
        "train/step train/objective train/optim train/bf16_adamw train/muon train/schedule train/loop_state "
        "strategy/gradients model/embedding_noise",
        "the same loss on any topology; objectives, schedules, early stopping",
    ),
    Row(
        "preference tuning",
        "train/preference train/reference train/precompute data/chat/preferences data/feed/mismatched",
        "objectives over pairs of answers and over answers with a label, and their reference",
    ),
    Row(
        "evaluation",
        "evaluate answers own_metric model/sampling run/answers run/opening",
        "token-weighted loss, and exact match of generated answers",
    ),
    Row("equal copies on all ranks", "train/replicas", "`--check_replicas`"),
    Row(
        "the strategy asked for is the one that runs",
        "strategy/topology strategy/strategies strategy/accelerator strategy/accelerate_config "
        "strategy/weights strategy/sending strategy/fsdp strategy/precision",
        "DDP, FSDP2, FSDP1 and offload from one config; rehearsals on a CPU; loading on one rank only",
    ),
    Row("hybrid sharding", "strategy/parallelism", "`fsdp_hybrid`; a refusal of parallelism that would have no effect"),
    Row(
        "one command starts the run",
        "strategy/launch strategy/launcher strategy/launch_problems strategy/torchrun",
        "a start without a launcher's flags; where a command does not work, the one that does",
    ),
    Row(
        "several machines",
        "strategy/rendezvous strategy/store strategy/machines strategy/meeting strategy/network strategy/agreement "
        "run/facts run/shared",
        "the same command on each machine; a refusal, not a hang, if they differ in data, code or settings",
    ),
    Row(
        "checkpoints that are complete or absent",
        "checkpoint durable",
        "resumes after a kill at any moment, with other numbers of ranks, from files without pickle",
    ),
    Row(
        "a run ends with its reason",
        "failures/exits failures/signals failures/guard phases",
        "exit statuses, and the checkpoint after a signal",
    ),
    Row(
        "dead and hung ranks are named",
        "failures/ranks failures/survey strategy/failure_note",
        "which rank failed or hangs, where and why, on each machine and within seconds",
    ),
    Row(
        "a run that cannot fit is refused",
        "memory/fit memory/formulas memory/host memory/operations memory/shape memory/sizes "
        "memory/workload memory/activations memory/families",
        "`auto` for batch size and checkpointing; a refusal before weights are read",
    ),
    Row("advice after memory ran out", "memory/shortage memory/advice", "what filled the memory, and which flags help"),
    Row(
        "one declaration for each setting",
        "config/fields config/expressions config/recipe config/settings config/recipe_file config/command_line "
        "config/validation config/dataset_entry config/prompt_format config/launch_flags config/json_schema "
        "config/conflicts config/optimisers",
        "YAML keys and flags, with `file:line` of each mistake, all at once; completion in editors",
    ),
    Row(
        "hints, also for words of other kits",
        "config/hints config/other_kits config/other_words config/other_files",
        "what to type instead of a flag of TRL, axolotl or DeepSpeed; files of other kits recognised",
    ),
    Row(
        "the same command continues the run",
        "run/folder run/identity run/output_dir run/record run/resume run/starts lock",
        "the output folder and its record; a refusal to mix or overwrite runs",
    ),
    Row(
        "the log",
        "run/log run/trackers run/throughput run/profile train/stopwatch strategy/waiting failures/underway console",
        "`metrics.jsonl`, trackers, progress, and where the time goes",
    ),
    Row("no secrets in files", "secrets", "a log and `run.json` without tokens and passwords"),
    Row("text of strangers only says something", "visible", "names and rows that no terminal acts on"),
    Row(
        "all mistakes before a weight is read",
        "preflight inputs errors",
        "one list of mistakes, before minutes of loading",
    ),
    Row(
        "plain models at the end",
        "export/card export/final export/shards export/stops",
        "`final/`, which plain transformers and peft open, written shard by shard",
    ),
    Row(
        "compiled layers",
        "model/compile strategy/compiler train/compilation",
        "`--torch_compile`, and the refusal of a machine that cannot compile",
    ),
    Row(
        "kernels of some GPUs",
        "strategy/kernels model/fp8_linear",
        "`--fp8`; a reason, before weights are read, where fp8 or FlashAttention 3 cannot run",
    ),
    Row(
        "exports that are what was trained",
        "export/checkpoint export/source export/proof",
        "a checkpoint as a model, a merged adapter; each opened again and compared, or not kept",
    ),
    Row(
        "GGUF and Ollama",
        "export/gguf export/llama_cpp_worker export/ollama",
        "files of llama.cpp's converter, compared with transformers; a Modelfile",
    ),
    Row(
        "quantisation-aware training",
        "model/qat export/torchao",
        "`--qat`: weights that a quantised model rounds with less loss; that model",
    ),
]


def files(module: str) -> list[Path]:
    """The files of a module or package; empty if there is none."""
    path = ROOT / "kit" / module
    if path.is_dir():
        return sorted(path.rglob("*.py"))
    file = path.with_suffix(".py")
    return [file] if file.is_file() else []


def num_lines(row: Row) -> int:
    """The lines of all modules of a row."""
    return sum(
        len(file.read_text(encoding="utf-8").splitlines()) for name in row.modules.split() for file in files(name)
    )


def table() -> str:
    """The table in Markdown, the most expensive promise first."""
    lines = ["| promise | lines | modules of `kit/` | what a user would lose |", "|---|---|---|---|"]
    for row in sorted(ROWS, key=num_lines, reverse=True):
        modules = ", ".join(f"`{name}`" for name in row.modules.split())
        lines.append(f"| {row.promise} | {num_lines(row):,} | {modules} | {row.without} |")
    lines.append(f"| in all | {sum(map(num_lines, ROWS)):,} | | |")
    return "\n".join(lines)


def main() -> None:
    """Write the table between its marks in the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
