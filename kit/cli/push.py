"""``kit push``: upload the model of a run to the hub."""

from kit.system.console import Parser

HELP = "upload the model of a run to the hub, private by default"
_ABOUT = f"""{HELP.capitalize()}. One commit has the model files and a complete model card: base,
licence, data, recipe, metrics and code. The same command again uploads only what is missing."""


def run(argv: list[str]) -> int:
    """Upload the model, and return 0. Raises ``UserError`` if it cannot be, with what to do."""
    parser = Parser(prog="kit push", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("source", metavar="RUN", help="a run, its final/, or a folder that kit export wrote")
    parser.add_argument("name", nargs="?", metavar="OWNER/NAME", help="repository; default: YOU/name-of-the-run")
    parser.add_argument("--public", action="store_true", help="make a new repository public; default: private")
    base = "hub id of the base model, if it was opened from a folder"
    parser.add_argument("--base_model", metavar="ID", help=base)
    asked = parser.parse_args(argv)
    from kit.tools.push import push

    push(**vars(asked))
    return 0
