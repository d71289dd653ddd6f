"""Tests that the docs use the field's own terms, and that pages which the kit names exist."""

import re

import pytest

from kit.config.paths import PACKAGE, ROOT

# As people type them into a search box.
TERMS = """
    sequence parallelism, classification head, value head|reward model, contrastive, bi-encoder, cross-encoder,
    knowledge distillation, on-policy distillation, gradient accumulation, load balancing, vision encoder,
    vision tower, function calling, tool calling, tool use, loss mask, hard negatives, importance sampling, KL
    penalty, reference model, policy, vision-language model, multi-turn, multimodal, preference optimisation,
    padding-free, mixed precision, activation checkpointing, learning-rate sweep, quantisation, classifier, soft
    labels, world size, advantage, policy gradient, system prompt, throughput, hyperparameters, early stopping,
    weight decay, LoRA, QLoRA, DPO, KTO, ORPO, GRPO, FSDP, DDP, HSDP, packing, chat template, tokenizer, tensor
    parallelism, checkpoint
"""
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
SOURCES = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.yaml"), *ROOT.glob("recipes/*")]


@pytest.mark.parametrize("term", [term.strip() for term in " ".join(TERMS.split()).split(",")])
def test_each_term_of_the_field_is_on_a_page(term):
    words = re.escape(term).replace("\\|", "|").replace("isation", "i[sz]ation")
    pattern = re.compile(re.sub(r"\\[- ]", r"[-\\s]+", words), re.IGNORECASE)
    assert [name for name, text in PAGES.items() if pattern.search(text)]


def test_each_page_and_section_that_the_kit_names_exists():
    named = {
        each for path in SOURCES if path.is_file() for each in re.findall(r"docs/[\w-]+\.md[#\w-]*", path.read_text())
    }
    sections = {
        f"{name}#{re.sub(r'[^a-z0-9 _-]', '', title.lower()).replace(' ', '-')}"
        for name, text in PAGES.items()
        for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }
    assert sorted(named - sections - PAGES.keys()) == []
