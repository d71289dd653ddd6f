"""Uploads to the hub: whether it takes one, and the one at the end of a run, which ``kit push`` makes.

Promises: the name, the token and its rights are checked without changing anything on the hub.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub  # loads its parts, which are slow to import, when they are used
from huggingface_hub import constants

from kit.system import interrupt
from kit.system.console import say
from kit.system.errors import Problem, Problems, UserError, causes, first_line

if TYPE_CHECKING:
    from huggingface_hub import HfApi

KINDS = {False: "a full model", True: "an adapter"}
_SETTING = "push_to_hub"
_AFTERWARDS = "leave it out, and upload after the run: `kit push RUN --base_model ID`"
_RIGHTS = "a token with write access: `hf auth login`, or HF_TOKEN"


def check_upload(name: str, base: str, is_adapter: bool) -> None:
    """Check before a run that ``push_at_end`` can upload what it makes.

    Args:
        name: of the repository, ``OWNER/NAME``.
        base: the model that is trained, as the run is given it.

    Raises:
        UserError: it cannot, with all reasons that are known.
    """
    problems = Problems()
    if os.path.exists(os.path.expanduser(base)):
        found = f"the model card must name the base, and {base} is a folder"
        problems.append(Problem(_SETTING, found, "a hub id", _AFTERWARDS))
    with problems.caught():
        find_repository(huggingface_hub.HfApi(), name, is_adapter, False, _SETTING)
    problems.raise_if_any()


def push_at_end(run: Path, name: str, wait: Callable[[], object]) -> None:
    """Upload the model of a finished run by ``kit push``, private. Never raises: the run is done. A signal ends it.

    Args:
        wait: called again and again while it is uploaded.
    """
    words = ["push", str(run), name]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    got: list[int] = []  # signals
    # From here to the end of the process: a signal may come twice, as a launcher passes it on. Nothing is left to save.
    for number in interrupt.SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: got.append(number))
    try:
        child = subprocess.Popen([sys.executable, "-m", "kit.cli.main", *words], env=environment)
        while child.poll() is None and not got:
            wait()
            time.sleep(0.2)
        if got:
            child.terminate()
            child.wait()
        reason = f"status {child.returncode}" if child.returncode else ""
    except OSError as error:
        reason = first_line(error)
    if got and reason:
        reason = f"stopped by {signal.Signals(got[0]).name}"
    if reason:
        again = shlex.join(["kit", *words])
        say(f"warning: the model is not uploaded ({reason}); it is complete here, and `{again}` uploads it")


def is_id(name: str) -> bool:
    """Whether ``name`` may be a hub id: ``OWNER/NAME``, or ``NAME``."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") <= 1 and not name.startswith((".", "/", "~"))


def find_repository(api: "HfApi", name: str, is_adapter: bool, is_public: bool, field: str) -> str:
    """Return the id of the repository, which may not exist yet.

    Args:
        is_adapter, is_public: what will be uploaded.
        field: what names the repository, for messages.

    Raises:
        UserError: it may not be written, it holds something else, or the hub cannot be asked.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    if not is_id(name):
        raise UserError(field, f"{name!r} is not a hub id", "OWNER/NAME")
    if not huggingface_hub.get_token():
        raise UserError("the hub", f"no token for {constants.ENDPOINT}", fix=_RIGHTS)
    with answers(name):
        me = api.whoami()
    mine, own = me["name"], name.rpartition("/")[2]
    owner = name.partition("/")[0] if "/" in name else mine
    repo = f"{owner}/{own}"
    roles = {mine: "admin"} | {org["name"]: org.get("roleInOrg", "write") for org in me.get("orgs", [])}
    if me.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError("the hub", f"the token of {mine} may only read", _RIGHTS)
    if roles.get(owner) in (None, "read"):
        why = "has no such member" if owner not in roles else "lets you only read"
        raise UserError(field, f"{owner}: {why} ({mine})", f"an owner for whom you may write: {mine}/{own}")
    with answers(repo):
        try:
            info = api.model_info(repo)
        except RepositoryNotFoundError:
            return repo
    if not info.private and not is_public:
        fix = "another name; or `kit push --public` after the run"
        raise UserError(field, f"{repo} is public: everyone would see the model", "a private one", fix)
    if info.private and is_public:
        found = f"{repo} is private, and stays so until you change it at {url_of(repo)}/settings"
        raise UserError("--public", found, fix="leave out --public")
    names = {file.rfilename for file in info.siblings or ()}
    if {"config.json", "adapter_config.json"} & names and ("adapter_config.json" in names) != is_adapter:
        found = f"{repo} holds {KINDS[not is_adapter]}, and this is {KINDS[is_adapter]}"
        raise UserError(field, found, "another name")
    return repo


@contextmanager
def answers(name: str) -> Iterator[None]:
    """Turn errors of requests about the repository ``name`` into ``UserError``."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    again = "the same command again uploads only what is missing"
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # connection errors, whose classes depend on the HTTP library in use
        found = next((each for each in causes(error) if isinstance(each, HfHubHTTPError)), None)
        reason = first_line(causes(error)[1] if isinstance(error, RuntimeError) and error.__cause__ else error)
        status = getattr(getattr(found, "response", None), "status_code", None)
        if status in (401, 403):
            raise UserError("the hub", f"it refuses your token for {name} ({reason})", _RIGHTS) from None
        if found is not None or isinstance(error, ValueError):
            raise UserError("the hub", f"it refuses {name} ({reason})", fix=again) from None
        offline = "HF_HUB_OFFLINE is set" if isinstance(error, OfflineModeIsEnabled) else reason
        fix = "connect to a network, and run the same command again"
        raise UserError("the hub", f"{constants.ENDPOINT} cannot be reached ({offline})", fix=fix) from None


def url_of(repo: str) -> str:
    """Return the address of a repository."""
    return f"{constants.ENDPOINT}/{repo}"
