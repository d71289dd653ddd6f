"""Files of GRPO and RLOO, once the user names the rewards by ``--rewards``: those of the file are code."""

import re

from kit.config.recipe import Recipe
from kit.schema.fields import choices
from kit.tools.convert.draft import Draft, Group, as_list, is_false, is_true, number

_REPLACED = ("reward_func", "reward_model")
_SERVER = ("vllm", "use_vllm", "async_", "sleep_level")
_PROMPT, _ANSWER = 512, 512  # tokens, where a file says nothing


def take_rollouts(draft: Draft) -> None:
    """Read the loss, the sampling and the lengths of such a file, if the user typed ``rewards``."""
    given = {**draft.given, **draft.given.get("trl", {})}  # a section of axolotl
    is_one = any(key.startswith(("reward_func", "num_generations")) for key in given)
    if "rewards" not in draft.typed or not (is_one or {"grpo", "gdpo"} & {given.get("rl"), given.get("rlhf_type")}):
        return
    draft.given = given
    draft.take("trl")
    draft.put("objective", "grpo")
    kind = _take_loss(draft)
    for key in [key for key in draft.given if key.startswith(_REPLACED)]:
        draft.leave(key, draft.take(key), "--rewards replaces them", Group.NEEDLESS)
    for key in [key for key in draft.given if key.startswith(_SERVER)]:
        if not is_false(value := draft.take(key)):
            draft.leave(key, value, "start a vLLM server yourself, and name it by vllm_server_base_url", Group.SPEED)
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if (value := draft.take(name)) is not None:
            draft.put(f"rollout_{name}", max(0, int(number(value))) if name == "top_k" else value)
    beta = number(draft.take("beta", 0.05 if kind == "rloo" else 0.04 if draft.kit == "ms-swift" else 0))
    if beta:
        draft.put("beta", beta)
    corrects = draft.take("use_bias_correction_kl", draft.kit == "TRL")
    if beta and kind != "rloo" and not is_false(corrects):
        draft.leave("use_bias_correction_kl", True, "the KL penalty is not multiplied by the probability ratio")
    answer = int(number(draft.take("max_completion_length", _ANSWER)))
    prompt = int(number(draft.take("max_prompt_length", draft.take("max_length", _PROMPT))))
    draft.put("max_new_tokens", answer)
    draft.put("max_length", prompt + answer, f"{prompt} for the prompt, and the completion")


def _take_loss(draft: Draft) -> str:
    """Set ``policy_loss``, and what advantages are divided by; return the first."""
    words = {str(draft.take(name, "")).lower() for name in ("rl", "rlhf_type", "trainer")}
    words |= {word for part in draft.path.parts[:-5:-1] for word in re.findall("[a-z]+", part.lower())}
    given = "".join(map(str, as_list(draft.take("loss_type")))).lower()
    kind = next((word for word in ("rloo", "gspo") if word in words), given)
    if kind not in choices(Recipe.model_fields["policy_loss"].annotation):
        kind = "grpo" if draft.kit == "ms-swift" else "dapo"
        if given:
            draft.leave("loss_type", given, "policy_loss lists the losses: docs/grpo.md")
    draft.put("policy_loss", kind)
    scale = draft.take("scale_rewards", "scale_rewards" not in draft.lines)  # the word none is nothing
    if "gdpo" in words:
        draft.put("multi_objective_aggregation", "normalize_then_sum")
    elif kind != "rloo" and draft.given.get("multi_objective_aggregation") != "normalize_then_sum":
        draft.put("scale_rewards", "group" if is_true(scale) else "none" if is_false(scale) else scale)
    if is_true(draft.take("normalize_advantages")):
        draft.leave("normalize_advantages", True, "advantages of rloo are not divided")
    if kind in ("gspo", "rloo"):
        draft.take("importance_sampling_level")
    if kind == "cispo" and (limit := draft.take("epsilon_high")) is not None:
        draft.put("epsilon_high", round(number(limit) - 1, 6), "there it is the limit itself")
    return kind
