"""Counts what `kit convert` does with a folder of example files of other kits.

    python benchmarks/convert.py FOLDER [--list REASON] [--keys 150]

FOLDER has a folder for each kit, with its YAML files below. A file is converted whole, with named drops (all that it
asks for is dropped), or refused. A file "fine-tunes on text" unless it is refused for its kind: rewards, images, sound,
classes, or because it trains nothing. ``--keys N`` types the N most frequent keys as flags, with their usual
value.
"""

import argparse
import re
from collections import Counter
from pathlib import Path

import yaml

from kit.config.command_line import read_command_line
from kit.config.validation import FLAGS
from kit.errors import UserError
from kit.tools.convert.convert import convert


def outcome(path: Path) -> tuple[str, list[str]]:
    """How a file was converted, and the keys that were dropped or the reasons why it was refused."""
    drops: list[str] = []
    for _ in range(2):
        try:
            convert(path, num_processes=8, drop=drops)
            return ("named drops" if drops else "whole"), drops
        except UserError as error:
            asked = [each[1] for problem in error.problems if (each := re.match(r"--drop (\S+)", problem.fix))]
            if not asked:
                return "refused", [
                    _reason(problem.where, f"{problem.found} {problem.fix}") for problem in error.problems
                ]
            drops = asked[0].split(",")
    return "refused", ["drops were not enough"]


def _reason(where: str, found: str) -> str:
    return re.sub(r"^\S*/|\[\d+\]", "", where) + f": {found}"


# What refuses a file for its kind: it is not about fine-tuning on text.
_OTHER_KINDS = (
    r"rewards|only text|images|causal language|trains nothing|known kit|ebft|bradley_terry|stepwise|rwd\.|diffusion"
)


def is_training_file(path: Path) -> bool:
    """Whether a file is a mapping that is not an Accelerate config or a list of data sets."""
    if path.suffix == ".sh":
        return bool(re.search(r"\b(sft|rlhf|pt|dpo|kto)\b", path.read_text(errors="replace")))
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return False
    return isinstance(values, dict) and "compute_environment" not in values


def answers_to_keys(folder: Path, num_keys: int) -> None:
    """Print what is said to each of the most frequent keys, and how many of each kind of answer there are."""
    values: dict[str, Counter[str]] = {}
    for path in folder.rglob("*.y*ml"):
        if is_training_file(path):
            for key, value in yaml.safe_load(path.read_text(encoding="utf-8")).items():
                if value is not None:
                    values.setdefault(str(key), Counter())[str(value)] += 1
    kinds: Counter[str] = Counter()
    for key in sorted(values, key=lambda key: -values[key].total())[:num_keys]:
        value = values[key].most_common(1)[0][0]
        fix = next(iter(_fixes(key, value)), "")
        known = key in FLAGS
        kind = "accepted" if known else "guess" if "did you mean" in fix else "nothing" if "--help" in fix else "hint"
        kinds[kind] += 1
        print(f"{kind:8} {values[key].total():4} {key} = {value[:40]!r}: {fix[:100]}")
    print(dict(kinds))


def _fixes(key: str, value: str) -> list[str]:
    request = read_command_line(["--model_name_or_path=m", "--dataset=d", f"--{key}={value}"])
    return [problem.fix for problem in request.problems if problem.where == f"--{key}"]


def main() -> None:
    """Print the table, and the reasons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--list", help="also list the files whose reason has this word")
    parser.add_argument("--keys", type=int, help="type this many of the most frequent keys as flags instead")
    flags = parser.parse_args()
    if flags.keys:
        answers_to_keys(flags.folder, flags.keys)
        return
    print("| kit | files | on text | whole | named drops | refused, on text |")
    print("|---|---|---|---|---|---|")
    dropped: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for kit in sorted(path for path in flags.folder.iterdir() if path.is_dir()):
        counts: Counter[str] = Counter()
        files = [path for path in sorted([*kit.rglob("*.y*ml"), *kit.rglob("*.sh")]) if is_training_file(path)]
        for path in files:
            how, why = outcome(path)
            if how == "refused" and any(re.search(_OTHER_KINDS, each) for each in why):
                how = "other kind"
            counts[how] += 1
            why = [re.sub(r"\[\d+\]|\.\w+_demo\b|\.identity\b", "", each) for each in why]
            (dropped if how == "named drops" else refused).update(f"{kit.name} {each}" for each in set(why))
            if flags.list and any(flags.list in each for each in why):
                print(path, how, why)
        on_text = len(files) - counts["other kind"]
        cells = [
            kit.name,
            len(files),
            on_text,
            *(counts[how] for how in ("whole", "named drops", "refused")),
        ]
        print(f"| {' | '.join(map(str, cells))} |")
    for name, reasons in (("dropped", dropped), ("refused", refused)):
        print(f"\n{name}:")
        for reason, number in reasons.most_common():
            print(f"  {number} {reason[:160]}")


if __name__ == "__main__":
    main()
