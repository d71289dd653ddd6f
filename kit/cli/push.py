"""``kit push``: upload the model of a run to the hub."""

from kit.system.console import Parser

HELP = "upload the model of a run to the hub, private unless you say otherwise"
_ABOUT = f"""{HELP.capitalize()}: a model repository, with its card complete: base, licence,
data, recipe, metrics, and how to load it. One commit: the repository never holds half a model. The same
command again uploads only what is missing. Nothing but the files of the model is uploaded."""


def run(argv: list[str]) -> int:
    """Upload the model, and return 0. Raises ``UserError`` if it cannot be, with what to do."""
    parser = Parser(prog="kit push", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("source", metavar="RUN", help="the folder of a run, its final/, or what kit export wrote")
    parser.add_argument("name", nargs="?", metavar="OWNER/NAME", help="default: yours, with the name of the run")
    parser.add_argument("--public", action="store_true", help="for everyone; default: a new repository is private")
    base = "hub id of the base, where the run had it from a folder"
    parser.add_argument("--base_model", metavar="ID", help=base)
    asked = parser.parse_args(argv)
    from kit.tools.push import push

    push(**vars(asked))
    return 0
