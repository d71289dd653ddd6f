"""A folder of a model says of an adapter that servers take only merged how to merge it."""

import pytest
import torch

from kit.config.settings.method import MethodSettings
from kit.export.final import describe_serving, write_model
from kit.model.build import build_model, open_config
from kit.model.load_plan import LoadPlan
from kit.model.pretrained.tokenizer import open_tokenizer


@pytest.mark.parametrize("changes", [{}, {"trainable_tokens": ["<|im_end|>"]}, {"use_dora": True}])
def test_an_adapter_that_servers_take_only_merged_says_so_with_the_command(model_folder, tmp_path, changes):
    settings = MethodSettings(model_name_or_path=str(model_folder), **changes)
    model = build_model(settings, open_config(settings), LoadPlan(compute_dtype="float32", device="cpu"))
    state = {name: torch.ones_like(p) for name, p in model.named_parameters() if p.requires_grad}
    write_model(tmp_path, model, state, open_tokenizer(settings), "the card\n", None)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("the card\n") and bool(changes) == ("recipes/export.py path/to/this/folder" in card)
    lines = describe_serving(model, tmp_path / "final")
    assert bool(lines) == bool(changes)
    assert all(line.endswith(f"python recipes/export.py {tmp_path}/final --output_dir merged") for line in lines)
