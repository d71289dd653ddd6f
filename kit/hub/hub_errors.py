"""Messages for errors of the hub: no such repository, a licence to accept, a refused token, no network.

Promises: each cause has its own message, with what to do; none makes a further request of its own but ``check_access``.
"""

from pathlib import Path
from typing import Any, Literal

import huggingface_hub  # loads its parts, which are slow to import, when they are used
from huggingface_hub import constants

from kit.system.errors import Problem, did_you_mean, first_line

Kind = Literal["model", "dataset"]
_TITLES: dict[Kind, str] = {"model": "model", "dataset": "dataset"}


def check_access(name: str, kind: Kind, info: Any) -> None:
    """Ask the hub whether files may be read, if ``info`` (of ``model_info`` or ``dataset_info``) says they are gated.

    Raises:
        HfHubHTTPError: they may not.
    """
    if getattr(info, "gated", False):
        huggingface_hub.HfApi().auth_check(name, repo_type=kind)


def refusal(error: Exception, tried: str, name: str, kind: Kind, field: str) -> Problem:
    """Return the problem for an error of a request to the hub.

    Args:
        tried: what was looked for before: ``no folder 'x'``.
        name: the hub id.
        field: the setting that names it.
    """
    from huggingface_hub import errors

    title = _TITLES[kind]
    url = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    reason = first_line(error)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return Problem(field, f"{tried}, and it is not a hub id ({reason})")
    if isinstance(error, errors.GatedRepoError):
        if "await" in str(error).lower():
            return Problem(field, f"{name}: your request for access awaits an answer", fix=f"see {url}")
        login = "" if huggingface_hub.get_token() else ", and log in: `hf auth login`"
        return Problem(field, f"{name}: its licence is not accepted", fix=f"accept it at {url}{login}")
    if isinstance(error, errors.RevisionNotFoundError):
        return Problem(f"{field}_revision" if kind == "dataset" else "model_revision", f"{name} has no such revision")
    if isinstance(error, errors.RepositoryNotFoundError):
        if huggingface_hub.get_token():
            found = f"the hub has no such {title}, or your token may not see it"
            fix = "`hf auth whoami` says who you are"
        else:
            found = f"the hub has no such public {title}"
            fix = "check the name; a private one needs `hf auth login`"
        return Problem(field, f"{tried}, and {found}", fix=fix)
    if status in (401, 403):
        fix = "`hf auth login` with one that may read it, or unset HF_TOKEN"
        return Problem(field, f"{name}: the hub refuses your token", fix=fix)
    if isinstance(error, errors.HfHubHTTPError):
        return Problem(field, f"{tried}, and the hub refuses it ({reason})", fix="try again later")
    if name in cached(kind):
        fix = "it is in the cache: HF_HUB_OFFLINE=1 takes it from there"
    else:
        fix = "give a local path, or connect to a network"
    return Problem(field, f"{tried}, and the hub cannot be reached ({reason})", fix=fix)


def not_cached(tried: str, name: str, kind: Kind, field: str) -> Problem:
    """Return the problem for a hub id that is not in the cache, while ``HF_HUB_OFFLINE`` forbids to ask the hub."""
    names = cached(kind)
    known = f"the cache has {', '.join(names[:8])}{' and others' if len(names) > 8 else ''}" if names else ""
    hint = did_you_mean(name, names) or known or f"the cache has no {_TITLES[kind]}"
    return Problem(field, f"{tried}, and it is not in the cache; HF_HUB_OFFLINE forbids to download it", fix=hint)


def cached(kind: Kind) -> list[str]:
    """Return the hub ids in the local cache."""
    folders = Path(constants.HF_HUB_CACHE).glob(f"{kind}s--*")
    return sorted(path.name.removeprefix(f"{kind}s--").replace("--", "/") for path in folders)
