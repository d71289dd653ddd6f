"""Write a model as GGUF, the format of llama.cpp and Ollama: by llama.cpp's own converter, and compared with it.

Promises:

- A model or a tokenizer that the converter does not know is refused before weights are read.
- What llama.cpp computes from the file is compared with transformers: ids, template, log-probabilities. Without the
  package llama-cpp-python a line says that this was not done.
- llama.cpp runs in a process of its own, so an end of its own does not leave half a folder.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from kit.export.proof import (
    Rows,
    Scores,
    change_between,
    check_change,
    check_ids,
    conversations,
    plain_template,
    rendered,
    texts_of,
)
from kit.export.sentencepiece_file import write_sentencepiece
from kit.system.console import announce_wait
from kit.system.errors import Problem, TrainingError, UserError, raise_if

SCRIPT = "convert_hf_to_gguf.py"
CONVERTED = ("f32", "f16", "bf16", "q8_0")  # by the converter; others by quantising what it wrote
# llama_ftype of llama.h; and the bound of the mean change in nats per token: set by hand, not derived.
QUANTISED: Mapping[str, tuple[int, float]] = {
    "q6_k": (18, 0.1),
    "q5_k_m": (17, 0.2),
    "q5_k_s": (16, 0.2),
    "q4_k_m": (15, 0.3),
    "q4_k_s": (14, 0.3),
    "q4_0": (2, 0.4),
    "q3_k_m": (12, 0.6),
    "q2_k": (10, 1.5),
}
BOUNDS = {"f32": 0.01, "f16": 0.02, "bf16": 0.05, "q8_0": 0.05} | {name: each[1] for name, each in QUANTISED.items()}
INSTALL = "pip install llama-cpp-python"
_WORKER = Path(__file__).with_name("llama_cpp_worker.py")
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
# Runs the converter with a name for the way that the tokenizer splits text, which it knows only by a hash.
_NAMED = """
import runpy, sys
script, name = sys.argv[1:3]
sys.argv = [script, *sys.argv[3:]]
sys.path.insert(0, script.rpartition("/")[0])
try:
    from conversion.base import TextModel
except ImportError:
    sys.exit("this version of llama.cpp takes no --pre_tokenizer")
TextModel.get_vocab_base_pre = lambda self, tokenizer: name
runpy.run_path(script, run_name="__main__")
"""


@dataclass(frozen=True)
class Tools:
    """Which parts of llama.cpp are installed."""

    converter: Path
    has_package: bool  # llama-cpp-python, which quantises and compares
    pretokeniser: str | None = None  # for a tokenizer that the converter does not know


def find_tools(folder: str | None, types: Sequence[str], pretokeniser: str | None) -> Tools:
    """Find what writes the ``types`` of GGUF.

    Args:
        folder: llama.cpp's, as typed; None: ``LLAMA_CPP``, or ``llama.cpp`` here.
        pretokeniser: ``--pre_tokenizer``.

    Raises:
        UserError: something is missing, with what to type.
    """
    problems = []
    converter = Path(folder or os.environ.get("LLAMA_CPP") or "llama.cpp").expanduser() / SCRIPT
    if not converter.is_file():
        fix = "`git clone --depth 1 https://github.com/ggml-org/llama.cpp`, then --llama_cpp llama.cpp"
        problems.append(Problem("--llama_cpp", f"no {converter}", "the folder of llama.cpp", fix))
    needed = ["sentencepiece"] if (converter.parent / "gguf-py").is_dir() else ["gguf", "sentencepiece"]
    if missing := [name for name in needed if find_spec(name) is None]:
        what = f"the converter needs {' and '.join(missing)}"
        problems.append(Problem("--format gguf", what, fix=f"pip install {' '.join(missing)}"))
    has_package = find_spec("llama_cpp") is not None
    quantised = [name for name in types if name in QUANTISED]
    if quantised and not has_package:
        what = f"{quantised[0]} needs the package llama-cpp-python"
        problems.append(Problem("--gguf_type", what, f"one of {', '.join(CONVERTED)}", INSTALL))
    raise_if(problems)
    return Tools(converter, has_package, pretokeniser)


def check_tokenizer(tools: Tools, settings: Any, config: Any, tokenizer: Any, folder: Path) -> None:
    """Let the converter write the vocabulary alone, before any weight is read.

    Args:
        folder: for what is written, empty.

    Raises:
        UserError: the converter does not know the model or the tokenizer.
    """
    plain = folder / "vocabulary"
    config.save_pretrained(plain)
    prepare_tokenizer(tokenizer, plain)
    error = _convert(tools, plain, folder / "vocabulary.gguf", ["--vocab-only"])
    found = f"llama.cpp's converter does not take {settings.model_name_or_path} ({error})"
    fix = "a newer llama.cpp may know it: `git pull` in its folder"
    if "pre-tokenizer was not recognized" in error:
        found = "llama.cpp's converter does not know how this tokenizer splits text"
        fix = "--pre_tokenizer NAME, from src/llama-vocab.cpp: llama-bpe, ...; wrong ids are detected"
    if error:
        raise UserError("--format gguf", found, fix=fix)


def prepare_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer for the converter, so that llama.cpp begins a prompt as training did.

    If it is SentencePiece's, ``tokenizer.model`` is written too, see ``write_sentencepiece``.
    ``{% generation %}`` marks, which only transformers knows, are taken out of the template. BOS is not added where the
    template writes none.
    """
    text = ""
    with suppress(UserError):
        template = plain_template(tokenizer)
        text = template.render(conversations()[0], None) if template else ""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8")) | write_sentencepiece(folder, text)
    if tokenizer.chat_template is not None:
        values["add_bos_token"] = bool(tokenizer.bos_token and text.startswith(tokenizer.bos_token))
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        text = template_file.read_text(encoding="utf-8")
        template_file.write_text(without_marks(text), encoding="utf-8")


def without_marks(template: str) -> str:
    """Return the Jinja text without ``{% generation %}``: the rendering is the same."""
    return _GENERATION.sub(lambda m: f"{{%{m[1]} {'endif' if m[2] else 'if true'} {m[3]}%}}", template)


def write_gguf(tools: Tools, plain: Path, folder: Path, name: str, types: Sequence[str]) -> dict[str, Path]:
    """Convert the model in ``plain``, once for each of ``types``. Returns the files, by type.

    Raises:
        TrainingError: llama.cpp's programs fail.
    """
    files = {type_: folder / f"{name}-{type_.upper()}.gguf" for type_ in types}
    source = folder / "source.gguf"  # of what is quantised
    is_wide = "float32" in json.loads((plain / "config.json").read_text())["dtype"]
    converted = {type_: path for type_, path in files.items() if type_ in CONVERTED}
    if len(converted) < len(files):
        converted["f32" if is_wide else "bf16"] = source
    for type_, path in converted.items():
        announce_wait(f"writing {path.name}")
        if error := _convert(tools, plain, path, ["--outtype", type_]):
            raise TrainingError(f"llama.cpp's converter failed to write {path.name}: {error}")
    for type_, path in files.items():
        if type_ in QUANTISED:
            announce_wait(f"writing {path.name}")
            answer = _ask(source, {"quantise": str(path), "ftype": QUANTISED[type_][0]})
            if answer["status"] != 0:
                raise TrainingError(f"llama.cpp failed to write {path.name}: status {answer['status']}")
    source.unlink(missing_ok=True)
    return files


def _convert(tools: Tools, plain: Path, file: Path, words: Iterable[str]) -> str:
    """Run the converter. Returns why it failed, in a line; empty if it did not."""
    script = str(tools.converter.resolve())
    named = ["-c", _NAMED, script, tools.pretokeniser] if tools.pretokeniser else [script]
    command = [sys.executable, *named, str(plain), "--outfile", str(file), *words]
    return _error_of(subprocess.run(command, capture_output=True, text=True))


def _error_of(result: "subprocess.CompletedProcess[str]") -> str:
    if result.returncode < 0:
        return f"{signal.Signals(-result.returncode).name} ended it"
    lines = [line.strip() for line in (result.stderr + result.stdout).splitlines() if line.strip()]
    return "" if result.returncode == 0 else (lines or [f"status {result.returncode}"])[-1]


def _ask(file: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Let llama.cpp open ``file``, in a process of its own, and do what ``asked`` says, see the worker."""
    command = [sys.executable, str(_WORKER), str(file)]
    result = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    if result.returncode:
        raise TrainingError(f"llama.cpp cannot open {file.name}: {_error_of(result)}")
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


def check_gguf(tools: Tools, file: Path, rows: Rows, tokenizer: Any, reference: Scores, bound: float) -> list[str]:
    """Compare what llama.cpp computes from ``file`` with transformers.

    Args:
        tokenizer: the one that was written.
        reference: the scores of transformers.
        bound: of the mean change, in nats per token.

    Returns:
        Lines for the user.

    Raises:
        TrainingError: ids or template differ, or answers by more than ``bound``.
    """
    if not tools.has_package:
        size = file.stat().st_size
        return [f"{file.name} ({size:,} bytes) was written and NOT compared: {INSTALL} compares it the next time"]
    # With a pretokeniser that the user chose, ids may be right for the model's texts and wrong for the kit's own.
    expected = texts_of(rows, tokenizer) + ([] if tools.pretokeniser else rendered(tokenizer))
    template = plain_template(tokenizer)
    asked = {"ids": rows.ids, "compared": rows.compared, "texts": [text for text, _ in expected]}
    answer = _ask(file, asked)
    lines = [check_ids(f"{file.name} in llama.cpp {answer['version']}", expected, answer["text_ids"])]
    written = answer["metadata"].get("tokenizer.chat_template")
    wanted = without_marks(template.source) if template else None
    if written != wanted:
        raise TrainingError(f"{file.name} has another chat template than the model; nothing was written")
    change = change_between(reference, np.array(answer["logprobs"]))
    lines += [check_change(f"{file.name} against transformers", change, bound)]
    return [*lines, f"    compared on {rows.origin}"]
