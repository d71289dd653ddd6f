"""What is exported is recognised; what is made of it was compared, has a card, and leaves nothing half made."""

import pytest
from helpers import FAKE_CONVERTER, ROOT, export
from huggingface_hub import ModelCard

from kit.export import gguf
from kit.export.source import find_source
from kit.system.errors import UserError


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
def test_a_gguf_file_lies_beside_a_card_and_nothing_else(tmp_path, monkeypatch, capsys):
    llama_cpp = tmp_path / "llama.cpp"
    llama_cpp.mkdir()
    (llama_cpp / "convert_hf_to_gguf.py").write_text(FAKE_CONVERTER)
    (llama_cpp / "mode").write_text("")
    monkeypatch.setattr(gguf, "find_spec", lambda name: None if name == "llama_cpp" else object())
    export(TINY, tmp_path / "new", "--format=gguf", "--gguf_type=f16,q8_0", f"--llama_cpp={llama_cpp}")
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"model-F16.gguf", "model-Q8_0.gguf", "README.md"}
    card = ModelCard((tmp_path / "new/README.md").read_text())
    assert card.data.tags == ["gguf"] and "NOT compared" in card.text and "and compared" not in card.text
    assert "NOT compared" in capsys.readouterr().out


def test_flags_that_do_not_fit_are_reported_at_once_and_nothing_is_written(tmp_path):
    for flags, says in [
        (["--format=compressed-tensors"], ["--scheme: missing, and "]),
        (["--format=compressed-tensors", "--scheme=W8A8", "--group_size=32"], ["--group_size: W8A8 has none"]),
        (["--format=compressed-tensors", "--scheme=W4"], ["--scheme: unknown: W4; expected one of W4A16, "]),
        (["--scheme=W8A8", "--group_size=0"], ["--scheme: only for compressed-tensors", "--group_size: 0"]),
        (["--gguf_type=q8_0", "--max_change=-1"], ["--gguf_type: only for GGUF", "--max_change: -1"]),
        (["--format=gguf", "--gguf_type=q9"], ["--gguf_type: unknown: q9"]),
        (["--dtype=float16"], ["a full model: nothing to merge"]),
        (["--merge"], ["--merge: "]),
    ]:
        with pytest.raises(UserError) as caught:
            export(TINY, tmp_path / "new", *flags)
        assert all(each in str(caught.value) for each in says) and list(tmp_path.iterdir()) == []
