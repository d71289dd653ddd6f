"""A credential is hidden anywhere in text and in any encoding; similar text is not."""

import json
from html import escape
from urllib.parse import quote

from kit.system.credentials import redacted, secret_spans

NAMED = ["HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"]
NAMED += ["PGPASSWORD", "KAGGLE_KEY", "GH_TOKEN_2", "SSH_PRIVATE_KEY", "mysql_pwd", "AZURE_CREDENTIALS", "APIKEY"]
NAMED += ["GITHUB_PAT", "SENTRY_DSN", "AZURE_STORAGE_CONNECTION_STRING", "DB_CONN_STR", "CONNECTIONSTRING"]
NOT_NAMED = [
    "PAT",
    "COMPAT",
    "EXPAT_DIR",
    "CONNECTION_STRING_NAME",
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


def test_credentials_in_urls_are_hidden():
    cases = [
        ("see https://me:p@ss@host/a, too", "see https://***@host/a, too"),
        ("'https://abc@host/a'", "'https://***@host/a'"),
        ("s3://b/k?X-Amz-Signature=ab1&part=2&hf_token=x", "s3://b/k?X-Amz-Signature=***&part=2&hf_token=***"),
        ("?access_token=abc", "?access_token=***"),
        ("hf_" + "aB3" * 11, "***"),
        ("hf://datasets/a/b@main?keyword=a&design=b", "hf://datasets/a/b@main?keyword=a&design=b"),
        ("mail a@b, https://host/a@b", "mail a@b, https://host/a@b"),
        ("12:30 a//b:c@d", "12:30 a//b:c@d"),
        ("AccountName=me;AccountKey=aB3+/aB3==;Suffix=core", "AccountName=me;AccountKey=***;Suffix=core"),
        ("Endpoint=sb://host/;SharedAccessKey=aB3=", "Endpoint=sb://host/;SharedAccessKey=***"),
    ]
    for text, hidden in cases:
        assert redacted(text) == hidden == redacted(hidden), (text, hidden)


TOKENS = [
    "hf_" + "aB3" * 11,
    *(f"gh{letter}_{'aB3' * 12}" for letter in "pousr"),
    "github_pat_11ABCDEFG0" + "aB3_" * 18,
    "glpat-" + "aB3-" * 5,
    "sk-" + "aB3" * 16,
    "sk-proj-" + "aB3_" * 30,
    "sk-ant-api03-" + "aB3-" * 24,
    "sk-or-v1-" + "0a9f" * 16,
    "AKIA" + "AB3D" * 4,
    "ASIA" + "AB3D" * 4,
    "AIza" + "aB3-_" * 7,
    "ya29." + "aB3-" * 20,
    "xoxb-123456789012-" + "aB3" * 8,
    "gsk_" + "aB3D" * 13,
    "nvapi-" + "aB3-" * 16,
    "npm_" + "aB3" * 12,
    "pypi-AgEIcHlwaS5vcmc" + "aB3_" * 20,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.aB3-_aB3-_aB3",
]


def test_tokens_of_known_services_are_hidden_wherever_they_stand():
    for token in TOKENS:
        for text in ("{}", "a {} b", '"{}"', "key={}", "/path/{}/file", "https://host/{}", "({}),"):
            shown = redacted(text.format(token))
            assert shown == text.format("***") == redacted(shown), token


def test_names_paths_and_hashes_are_no_tokens():
    cases = [
        "meta-llama/Llama-3.1-8B-Instruct",
        "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8",
        "sk-learn/a-model-for-the-classification-of-everything-there-is",
        "task-proj-abcdefghijklmnopqrstuvwxyz0123",
        "risk-" + "ab" * 30,
        "hf_model_that_follows_instructions_v2",
        "da39a3ee5e6b4b0d3255bfef95601890afd80709",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "123e4567-e89b-12d3-a456-426614174000",
        "models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f249a16976918f6564b8830bc894c89659",
        "AKIAMODEL/weights-00001-of-00002.safetensors",
        "npm_packages/eyJ/xoxo-hugs",
        "<|im_start|> model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "runs/llama-8b-qlora-single/checkpoints/step-00000040;key frames",
    ]
    for text in cases:
        assert redacted(text) == text, text


def test_spans_of_credentials_are_returned_in_order(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "n0t-for-you")
    text = "n0t-for-you, https://me@host and ?token=x"
    assert [text[start:end] for start, end in secret_spans(text)] == ["n0t-for-you", "me", "x"]
    assert secret_spans("nothing here") == []
