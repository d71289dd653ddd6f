"""Which adapters inference servers load correctly, and which they refuse or would scale wrongly."""

from peft import get_peft_model_state_dict

from kit.model.adapters.adapter import attach_adapter
from kit.model.adapters.serving import why_not_served
from kit.model.build import build_meta_model, open_config

# For each setting that changes what an adapter is, a value other than its default.
CHANGES = {
    "adapter_type": "oft",
    "lora_r": 64,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "lora_target_modules": ["q_proj", "lm_head"],
    "lora_modules_to_save": ["norm"],
    "trainable_tokens": ["<|im_end|>"],
    "new_tokens": ["<a>"],
    "use_rslora": True,
    "use_dora": True,
    "init_lora_weights": "gaussian",
}


def adapted(recipe):
    return attach_adapter(build_meta_model(recipe, open_config(recipe)), recipe)


def test_an_adapter_that_holds_more_than_two_matrices_a_module_is_named(recipe):
    """vLLM and llama.cpp read tensors of these two names only; of the config they read no other scale than rslora's."""
    for setting in ["", *CHANGES]:
        model = adapted(recipe(**{key: value for key, value in CHANGES.items() if key == setting}))
        names = get_peft_model_state_dict(model, save_embedding_layers=False)
        others = [name for name in names if not name.endswith(("lora_A.weight", "lora_B.weight"))]
        reason = why_not_served(model.peft_config["default"])
        assert bool(others) == ("vLLM and llama.cpp" in reason), setting
        assert (reason == "llama.cpp, SGLang and LMDeploy do not apply the scaling of use_rslora") == (
            setting == "use_rslora"
        ), setting
