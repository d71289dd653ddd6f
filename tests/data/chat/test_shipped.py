"""The templates that the kit ships: each names its tokens, and the text that is saved with a model stays the same."""

import hashlib
import re

from helpers import ROOT

from kit.data.chat.shipped import SHIPPED

# Of the text that is saved with a model. It is part of a run's fingerprint: with another text, runs begun before could
# not be continued.
SAVED_TEXTS = {
    "alpaca": "6c46315192596dde",
    "bare": "8c860591704a95ea",
    "chatml": "2d25a233c34b1018",
    "gemma": "4f6c434ff4095822",
    "llama2": "39f81a870e768367",
    "llama3": "aeba393d35c77c40",
    "mistral": "3fd0916b3e28dce2",
    "phi3": "38f63e96d5a9bc09",
    "phi4": "208ecec33a211d87",
    "tulu": "358fd9f9655afeb2",
    "vicuna": "9948da5455e933a7",
    "zephyr": "424e97e026f3c0fc",
}


def test_the_text_that_is_saved_with_a_model_stays_the_same():
    found = {name: hashlib.sha256(shipped.source.encode()).hexdigest()[:16] for name, shipped in SHIPPED.items()}
    assert found == SAVED_TEXTS


def test_the_page_on_chat_templates_lists_every_template():
    page = (ROOT / "docs/chat-templates.md").read_text()
    [listed] = re.findall(r"templates for base\s+models: ([^.]*)\.", page)
    assert re.findall(r"`([^`]*)`", listed) == list(SHIPPED)
