"""New tokens, tokens whose rows train, and modules that train whole: under every method and strategy, and reloaded."""

import json

import pytest
import torch
from helpers import export, make_model, matrix
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow
NEW = {"chat_template": "phi4", "new_tokens": "<|im_sep|>"}
ROWS = {"trainable_tokens": "<|im_end|>"}
WHOLE = {"lora_modules_to_save": "embed_tokens,lm_head"}
CASES = [
    ("lora", "untied", "fsdp", NEW),
    ("qlora", "tied", "ddp", NEW | ROWS),
    ("full", "tied", "fsdp", NEW),
    ("lora", "tied", "fsdp", NEW | WHOLE),
    ("qlora", "untied", "fsdp", NEW),
    ("lora", "untied", "single", ROWS),
    ("lora", "tied", "fsdp", NEW),
    ("lora", "untied", "fsdp1", WHOLE),
    ("full", "untied", "ddp", NEW),
    ("full", "untied", "fsdp1", NEW),
    ("qlora", "untied", "single", NEW | WHOLE),
    ("lora", "untied", "ddp", NEW | WHOLE),
]


@pytest.mark.parametrize(("method", "tie", "config", "flags"), matrix(CASES[:6], rest=CASES))
def test_what_trains_is_saved_and_opens_plainly(finetune, fp32, tmp_path, chat_file, method, tie, config, flags):
    """The kit, plain transformers or peft, a checkpoint, a resumed run and a merged model all give the same loss."""
    base = make_model(tmp_path / "base", tie_word_embeddings=tie == "tied")
    processes = 1 if config == "single" else 2
    common = {"max_length": 256, "eval_dataset": chat_file, "max_eval_samples": 5, "eval_on_start": "true"}
    flags = {**flags, **common, "model_name_or_path": base, "config": fp32[config], "method": method}
    run = finetune.ok("run", processes, **flags, max_steps=3, save_steps=2, save_total_limit=0)
    first, last = (row["eval_loss"] for row in run.rows if "eval_loss" in row)
    assert last < first
    final, checkpoint = run.folder / "final", run.folder / "checkpoints/step-00000003"
    # Servers refuse what such an adapter holds beside its matrices: the run says so when it begins and when it ends.
    assert run.output.count(f"{final} --output_dir merged") == (0 if method == "full" else 2)
    score = finetune.score("score", **{**flags, "model_name_or_path": final, "config": fp32["single"]})
    assert json.loads(score.output.splitlines()[-1])["eval_loss"] == pytest.approx(last, rel=1e-5)
    # a step again, from the checkpoint before it
    part = finetune.ok(
        "part", processes, **flags, max_steps=3, resume_from_checkpoint=run.folder / "checkpoints/step-00000002"
    )
    assert part.rows[-1]["eval_loss"] == pytest.approx(last, rel=1e-6)

    tokenizer = AutoTokenizer.from_pretrained(final)
    chats = [json.loads(line)["messages"] for line in chat_file.read_text().splitlines()[:2]]
    ids = tokenizer.apply_chat_template(chats[0], return_tensors="pt", return_dict=True)["input_ids"]
    if "new_tokens" in flags:
        assert ids.max() == 320 == tokenizer.convert_tokens_to_ids("<|im_sep|>")
        assert "im_sep" not in tokenizer.decode(ids[0], skip_special_tokens=True)
    if method == "full":
        assert AutoModelForCausalLM.from_pretrained(final).get_input_embeddings().num_embeddings == 321
        return
    plain = AutoPeftModelForCausalLM.from_pretrained(final, dtype=torch.float32).eval()
    export(checkpoint, tmp_path / "merged", "--merge", "--dtype=float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.allclose(plain(ids).logits, merged(ids).logits, atol=1e-4)
