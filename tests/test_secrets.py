"""A credential is hidden wherever it stands in text and however it is written; what only looks like one is not."""

import json
from html import escape
from urllib.parse import quote

import pytest

from kit.secrets import redacted, secret_spans

NAMED = ["HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"]
NAMED += ["PGPASSWORD", "KAGGLE_KEY", "GH_TOKEN_2", "SSH_PRIVATE_KEY", "mysql_pwd", "AZURE_CREDENTIALS", "APIKEY"]
NOT_NAMED = [
    "TOKENIZERS_PARALLELISM",
    "MAX_TOKENS",
    "PWD",
    "HF_TOKEN_PATH",
    "KEYBOARD",
    "SECRETARY",
    "TOKEN_URL",
    "HOME",
]


def test_values_of_variables_with_secret_names_are_hidden(monkeypatch):
    for name in NAMED:
        with monkeypatch.context() as patch:
            patch.setenv(name, "n0t-for-you")
            assert redacted("a n0t-for-you b") == "a *** b", name
    for name in NOT_NAMED:
        with monkeypatch.context() as patch:
            patch.setenv(name, "n0t-secret")
            assert redacted("a n0t-secret b") == "a n0t-secret b", name


def test_short_values_and_paths_are_no_secrets(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "false")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    assert redacted(f"false {tmp_path}") == f"false {tmp_path}"


def test_a_secret_is_hidden_however_it_is_written(monkeypatch):
    secret = "n0t <for> \"you\" & 'me' \\ ü #1"
    monkeypatch.setenv("MY_SECRET", secret)
    for text in (secret, json.dumps(secret), escape(secret), quote(secret, safe=""), repr(secret)):
        assert "for" not in redacted(f"<{text}>"), text
    monkeypatch.setenv("MY_SECRET", "-----BEGIN KEY-----\nAAAABBBBCCCC\nDDDDEEEEFFFF\n-----END KEY-----")
    assert redacted("DDDDEEEEFFFF") == "***"
    monkeypatch.setenv("HF_TOKEN", "AAAABBBBCCCCDDDD")  # begins like a line of the other
    assert redacted("AAAABBBBCCCCDDDD") == "***"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("see https://me:p@ss@host/a, too", "see https://***@host/a, too"),
        ("'https://abc@host/a'", "'https://***@host/a'"),
        ("s3://b/k?X-Amz-Signature=ab1&part=2&hf_token=x", "s3://b/k?X-Amz-Signature=***&part=2&hf_token=***"),
        ("?access_token=abc", "?access_token=***"),
        ("hf_" + "aB3" * 11, "***"),
        ("hf://datasets/a/b@main?keyword=a&design=b", "hf://datasets/a/b@main?keyword=a&design=b"),
        ("mail a@b, https://host/a@b", "mail a@b, https://host/a@b"),
        ("12:30 a//b:c@d", "12:30 a//b:c@d"),
    ],
)
def test_credentials_in_urls_are_hidden(text, hidden):
    assert redacted(text) == hidden == redacted(hidden)


def test_spans_of_credentials_are_returned_in_order(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "n0t-for-you")
    text = "n0t-for-you, https://me@host and ?token=x"
    assert [text[start:end] for start, end in secret_spans(text)] == ["n0t-for-you", "me", "x"]
    assert secret_spans("nothing here") == []
