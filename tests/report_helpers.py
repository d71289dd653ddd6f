"""Samples looked at as `kit inspect` does."""

from data_helpers import open_all, recipe

from kit.report.samples_page import look


def looked(tokenizer, num_samples=5, **flags):
    return look(recipe(**flags), tokenizer, open_all(tokenizer, **flags), num_samples)


def checks(gathered):
    return {text: verdict for verdict, text in gathered.checks}
