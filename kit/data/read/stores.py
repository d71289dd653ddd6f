"""Remote stores: s3://, gs://, hf://, https://, memory:// and whatever else fsspec opens.

Promises: a request that fails is made again; one that the store refuses is not. A message names the URL, the cause
and what to do. Credentials come from the environment or the files of the store's own library, never from a URL.
"""

import errno
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from kit.system.errors import Problem, UserError, causes, did_you_mean_path, first_line

T = TypeVar("T")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}  # the package for each protocol
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError")
_REFUSED = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
PAUSES_SECONDS = (1.0, 2.0, 4.0)  # between the attempts of a request; libraries make some of their own
CONNECT_SECONDS = 10  # botocore would wait for a minute, several times


def is_url(name: str) -> bool:
    """Return whether ``name`` is a URL such as ``s3://bucket/my.jsonl``, and not a path or a hub id."""
    return bool(_URL.match(name))


def open_filesystem(url: str, field: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it, without a slash at its end.

    Args:
        field: the setting that names it, for messages.

    Raises:
        UserError: fsspec does not know such URLs, or needs a package for them that is not installed.
    """
    import fsspec

    protocol = url.partition("://")[0]
    options: dict[str, Any] = {}
    if _PACKAGES.get(protocol) == "s3fs" and "config_kwargs" not in fsspec.config.conf.get(protocol, {}):
        options["config_kwargs"] = {"connect_timeout": CONNECT_SECONDS}
    try:
        filesystem, path = fsspec.url_to_fs(url, **options)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        fix = f"python -m pip install {package}" if package else f"install it ({first_line(error)})"
        found = f"{url!r} needs a package that is not installed"
        raise UserError(field, found, fix=fix) from None
    except ValueError as error:
        raise UserError(field, f"{url!r}: {first_line(error)}", "s3://, gs://, hf://, ...") from None
    except Exception as error:  # each library has its own
        raise UserError(problem_of(error, url, field)) from None
    return filesystem, str(path).rstrip("/") or str(path)


def retried(work: Callable[[], T], pauses_seconds: tuple[float, ...] = PAUSES_SECONDS) -> T:
    """Return what ``work`` returns. If it fails, call it again after each pause, unless that cannot help.

    Raises what the last call raises.
    """
    for pause in pauses_seconds:
        try:
            return work()
        except Exception as error:
            if is_final(error):
                raise
            time.sleep(pause)
    return work()


def is_final(error: BaseException) -> bool:
    """Return whether the same request would fail again: nothing there, no right, no credentials, a full disk."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, _REFUSED) or is_full or _has_no_credentials(error)


def _has_no_credentials(error: BaseException) -> bool:
    return any(type(each).__name__ in _NO_CREDENTIALS for each in causes(error))


def problem_of(error: BaseException, url: str, field: str, filesystem: Any = None, path: str = "") -> Problem:
    """Return the problem for an exception of a request about ``url``.

    Args:
        filesystem: is asked for similar names next to ``path``, if nothing is there.
    """
    reason = first_line(error)
    if _has_no_credentials(error):
        fix = "log in as for the store's own programs (`aws configure`, AWS_PROFILE; `gcloud auth application-default "
        fix += "login`); for what everyone may read, FSSPEC_S3_ANON=true or FSSPEC_GS_TOKEN=anon"
        return Problem(field, f"{url!r}: no credentials ({reason})", fix=fix)
    if isinstance(error, FileNotFoundError):
        siblings: list[str] = []
        with suppress(Exception):  # the folder above may not be listed
            siblings = [str(name).rstrip("/").rpartition("/")[2] for name in filesystem.ls(_parent(path), detail=False)]
        return Problem(field, f"nothing at {url!r}, or no such bucket", fix=did_you_mean_path(url, siblings))
    if isinstance(error, PermissionError):
        fix = "give the account that right, or use another one; `aws s3 ls` and the like show its rights"
        return Problem(field, f"{url!r}: not allowed ({reason})", fix=fix)
    own = "; for another S3 endpoint: AWS_ENDPOINT_URL" if _PACKAGES.get(url.partition("://")[0]) == "s3fs" else ""
    fix = f"check the network, then type the same command again{own}"
    return Problem(field, f"{url!r} cannot be reached ({type(error).__name__}: {reason})", fix=fix)


def _parent(path: str) -> str:
    return path.rstrip("/").rpartition("/")[0]
