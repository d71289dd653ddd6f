"""``kit push``: upload the model of a run to the hub."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from kit.console import Parser

HELP = "upload the model of a run to the hub, private unless you say otherwise"
_ABOUT = f"""{HELP.capitalize()}: a model repository, with its card complete: base, licence,
data, recipe, metrics, and how to load and serve it. One commit: the repository never holds half a model. The same
command again uploads only what is missing. Nothing but the files of the model is uploaded."""


@dataclass(frozen=True)
class Asked:
    """What was typed."""

    source: str  # the folder of a run, its final/, or an exported folder
    name: str | None  # OWNER/NAME, or NAME
    public: bool
    with_run: bool
    base_model: str | None
    dry_run: bool

    def again(self, **changes: object) -> str:
        """Return the command that was typed, with some of it changed."""
        asked = replace(self, **changes)  # type: ignore[arg-type]
        words = ["kit", "push", asked.source, *([asked.name] if asked.name else [])]
        words += ["--public"] * asked.public + ["--with_run"] * asked.with_run
        words += ["--base_model", asked.base_model] if asked.base_model else []
        return shlex.join([*words, *["--dry_run"] * asked.dry_run])


def run(argv: list[str]) -> int:
    """Upload the model, and return 0. Raises ``UserError`` if it cannot be, with what to do."""
    parser = Parser(prog="kit push", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("source", metavar="RUN", help="the folder of a run, its final/, or what kit export wrote")
    parser.add_argument("name", nargs="?", metavar="OWNER/NAME", help="default: yours, with the name of the run")
    parser.add_argument("--public", action="store_true", help="for everyone; default: a new repository is private")
    parser.add_argument(
        "--with_run", action="store_true", help="run.json and metrics.jsonl too, with the paths in them"
    )
    base = "hub id of the base, where the run had it from a folder; none: a model whose base is not on the hub"
    parser.add_argument("--base_model", metavar="ID", help=base)
    parser.add_argument("--dry_run", action="store_true", help="check, and say what would be uploaded; change nothing")
    asked = Asked(**vars(parser.parse_args(argv)))
    from kit.tools import push

    push.push(replace(asked, source=str(Path(asked.source).expanduser())))
    return 0
