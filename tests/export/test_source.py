"""What is exported is recognised; what is made of it was compared, has a card, and leaves nothing half made."""

import json
import re
import shlex

import pytest
import torch
from helpers import FAKE_CONVERTER, ROOT, export
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from kit.errors import TrainingError, UserError
from kit.export import gguf
from kit.export.source import find_source


def test_the_folder_of_a_run_stands_for_its_final(tmp_path):
    final = tmp_path / "my run/final"
    final.mkdir(parents=True)
    (final / "config.json").write_text("{}")
    (final.parent / "run.json").write_text("{}")
    for path in (final, final.parent):
        opened = find_source(path, None, "false")
        assert opened.is_model and opened.name == "my-run" and opened.run_file == final.parent / "run.json"
    with pytest.raises(UserError, match=r"no manifest\.json, no adapter_config.json, no config.json"):
        find_source(tmp_path, None, "false")


TINY = ROOT / "recipes/tiny/model"


@pytest.mark.slow
def test_a_model_is_written_again_in_another_dtype_and_in_shards_with_a_card(tmp_path):
    export(TINY, tmp_path / "new", "--dtype=bfloat16", "--shard_size=1MB")
    names = sorted(path.name for path in (tmp_path / "new").glob("*.safetensors"))
    assert len(names) > 1 and names[0].startswith("model-00001-of-")
    assert {each.dtype for name in names for each in load_file(tmp_path / "new" / name).values()} == {torch.bfloat16}
    card = ModelCard((tmp_path / "new/README.md").read_text())
    assert card.data.library_name == "transformers" and "AutoModelForCausalLM" in card.text


@pytest.mark.slow
def test_a_model_that_is_not_what_was_written_leaves_nothing(tmp_path, monkeypatch):
    from kit.export import checkpoint

    whole = checkpoint.check_folder

    def damage(folder, *others):
        file = folder / "model.safetensors"
        save_file({name: tensor * 1.5 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
        return whole(folder, *others)

    monkeypatch.setattr(checkpoint, "check_folder", damage)
    with pytest.raises(TrainingError, match=r"\(bound 0.05\): too far, so nothing was kept"):
        export(TINY, tmp_path / "new", "--dtype=bfloat16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_gguf_file_lies_beside_a_card_and_a_modelfile_and_nothing_else(tmp_path, monkeypatch, capsys):
    llama_cpp = tmp_path / "llama.cpp"
    llama_cpp.mkdir()
    (llama_cpp / "convert_hf_to_gguf.py").write_text(FAKE_CONVERTER)
    (llama_cpp / "mode").write_text("")
    monkeypatch.setattr(gguf, "find_spec", lambda name: None if name == "llama_cpp" else object())
    export(TINY, tmp_path / "new", "--format=gguf", "--gguf_type=f16,q8_0", "--ollama", f"--llama_cpp={llama_cpp}")
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"model-F16.gguf", "model-Q8_0.gguf", "Modelfile", "README.md"}
    card = ModelCard((tmp_path / "new/README.md").read_text())
    assert card.data.tags == ["gguf"] and "NOT compared" in card.text
    assert "NOT compared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--format=torchao"], ["--qat: missing, and "]),
        (["--qat=int8_weight_only", "--qat_group_size=1"], ["--qat: of weights", "--qat_group_size: 1"]),
        (["--gguf_type=q8_0", "--ollama"], ["--gguf_type: of GGUF files", "--ollama: of GGUF files"]),
        (["--format=gguf", "--gguf_type=q9"], ["--gguf_type: unknown: q9"]),
        (["--format=gguf", "--shard_size=1GB"], ["--shard_size: a GGUF file is one file"]),
        (["--shard_size=5", "--max_change=-1"], ["--shard_size: '5'", "--max_change: -1"]),
        (["--rows=/gone.jsonl"], ["--rows: no file /gone.jsonl"]),
        (["--dataset_columns=q"], ["--dataset_columns: given without --rows", "--dataset_columns: found 'q'"]),
        ([], ["a full model: nothing to merge"]),
        (["--merge", "--dtype=float16"], ["--merge: "]),
    ],
)
def test_flags_that_do_not_fit_are_reported_at_once_and_nothing_is_written(tmp_path, flags, says):
    with pytest.raises(UserError) as caught:
        export(TINY, tmp_path / "new", *flags)
    assert all(each in str(caught.value) for each in says) and list(tmp_path.iterdir()) == []


def test_columns_of_the_rows_to_compare_on_are_named_as_the_message_says(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "What is it?", "answer": "It is a dog that runs fast."}) + "\n")
    flags = ["--format=torchao", "--qat=int8_weight_only", f"--rows={rows}"]
    with pytest.raises(UserError) as refused:
        export(TINY, tmp_path / "new", *flags)
    fix = re.search(r"--dataset_columns [^\s;]+", str(refused.value))[0]
    export(TINY, tmp_path / "new", *flags, *shlex.split(fix))
    assert f"the first rows of {rows} (1)" in capsys.readouterr().out
