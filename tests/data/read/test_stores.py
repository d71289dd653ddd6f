"""Requests to a store are made again if that can help, and what a store refuses is said with what to do."""

import pytest

from kit.data.read.stores import is_url, open_filesystem, problem_of, retried
from kit.system.errors import UserError


class NoCredentialsError(Exception):
    """As botocore has it."""


def test_an_address_has_a_protocol():
    for name in ["s3://b/x", "memory://x", "abfs+x://y", "HTTPS://x"]:
        assert is_url(name), name
    assert not any(map(is_url, ["a/b", "/a", "openai/gsm8k:main", "C:/x", "./s3:/x", "x/s3://y"])), name


@pytest.mark.parametrize(("error", "num_calls"), [(ConnectionError(), 4), (PermissionError(), 1),
                         (FileNotFoundError(), 1), (OSError(28, "full"), 1), (NoCredentialsError(), 1)])  # fmt: skip
def test_only_what_may_pass_is_tried_again(error, num_calls, monkeypatch):
    pauses, calls = [], []
    monkeypatch.setattr("time.sleep", pauses.append)

    def work():
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        retried(work)
    assert len(calls) == num_calls
    assert pauses == [1.0, 2.0, 4.0][: num_calls - 1]


def test_each_cause_has_its_message():
    cases = [
        (NoCredentialsError("none"), "dataset: 's3://b/x': no credentials (none)\n    -> log in as for"),
        (
            PermissionError("Forbidden"),
            "dataset: 's3://b/x': not allowed (Forbidden)\n    -> give the account that right",
        ),
        (FileNotFoundError("x"), "dataset: nothing at 's3://b/x', or no such bucket"),
        (TimeoutError("slow"), "cannot be reached (TimeoutError: slow)\n    -> check the network, then type the same"),
    ]
    for error, message in cases:
        assert message in str(problem_of(error, "s3://b/x", "dataset")), (error, message)


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    def missing(address, **options):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.url_to_fs", missing)
    with pytest.raises(UserError, match="needs a package that is not installed") as caught:
        open_filesystem("s3://b/x", "dataset")
    assert "pip install s3fs" in str(caught.value)
    with pytest.raises(UserError, match="Install s3fs"):
        open_filesystem("sftp://b/x", "dataset")
