"""The layers of families that have other parts, or several kinds: experts, linear attention, sliding windows, shared
keys and values.

Promises: the numbers of parameters are exact. What a layer keeps for its backward pass is that of transformers' own
code, without the package flash-linear-attention.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kit.memory.shape import Experts, Linear, Shape

_CHUNK = 64  # tokens of a chunk of the gated delta rule


def qwen3_5(shape: Shape, values: Mapping[str, Any]) -> Shape:
    """Return the shape of Qwen3.5: linear attention (gated delta rule), and full attention in each fourth layer.

    Args:
        shape: of a plain layer.
        values: of the config of the text.
    """
    h, q, kv = shape.hidden_size, shape.query_size, shape.kv_size
    mlp = _mlp(h, shape.intermediate_size)
    # The queries' module makes also a gate of attention's output.
    queries = (Linear("q_proj", h, 2 * q), Linear("k_proj", h, kv), Linear("v_proj", h, kv), Linear("o_proj", q, h))
    full = replace(shape, own_linears=(*queries, *mlp), kept_values=3 * q)
    key_heads, value_heads = values["linear_num_key_heads"], values["linear_num_value_heads"]
    of_key, of_value = values["linear_key_head_dim"], values["linear_value_head_dim"]
    of_keys, of_values = key_heads * of_key, value_heads * of_value
    mixed = 2 * of_keys + of_values
    mixer = {"in_proj_qkv": (h, mixed), "in_proj_z": (h, of_values), "out_proj": (of_values, h)}
    mixer |= {"in_proj_b": (h, value_heads), "in_proj_a": (h, value_heads)}
    linear = replace(
        shape,
        own_linears=(*(Linear(name, *size, within="linear_attn") for name, size in mixer.items()), *mlp),
        num_heads=value_heads,
        num_kv_heads=key_heads,
        head_dim=of_value,
        norm_of_heads="",
        # The convolution, the step's bias and decay, and the norm of a head.
        own_vectors=mixed * values.get("linear_conv_kernel_dim", 4) + 2 * value_heads + of_value,
        # It keeps 4K + 4V values, of which the formula of attention counts 2K + 2V. In float32, for each head
        # of values: six values, eight keys, what a token has with others of its chunk, and the state of each chunk.
        kept_values=2 * of_keys + 2 * of_values,
        kept_floats=value_heads * (6 * of_value + 8 * of_key + 5 * _CHUNK + of_key * of_value // _CHUNK),
        attended=2 * of_key + 2 * _CHUNK,
    )
    kinds = Counter(values["layer_types"])
    if set(kinds) != {"linear_attention", "full_attention"} or kinds.total() != shape.num_layers:
        raise ValueError(f"layer_types of {kinds.total()} layers: {', '.join(sorted(kinds))}")
    return _mixed([(kinds["linear_attention"], linear), (kinds["full_attention"], full)])


def mixture(shape: Shape, values: Mapping[str, Any]) -> Shape:
    """Return the shape of a model each of whose layers has fused experts: Mixtral, Qwen3 MoE, gpt-oss.

    Args:
        shape: of a plain layer.
        values: of the config of the text.
    """
    if values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1:
        raise ValueError("layers without experts")
    is_gpt_oss = values["model_type"] == "gpt_oss"  # whose layers are biased, and have a sink for each head
    number = next(values[key] for key in ("num_experts", "num_local_experts") if key in values)
    size, per_token = values.get("moe_intermediate_size") or shape.intermediate_size, values["num_experts_per_tok"]
    if not 0 < per_token <= number or size <= 0:
        raise ValueError(f"{per_token} of {number} experts of size {size}")
    experts = Experts(
        number=number,
        per_token=per_token,
        inputs=shape.hidden_size,
        size=size,
        has_bias=is_gpt_oss,
        in_mxfp4=(values.get("quantization_config") or {}).get("quant_method") == "mxfp4",
    )
    return replace(
        shape,
        intermediate_size=per_token * size,
        own_linears=shape.linears[:4],
        own_vectors=shape.num_heads if is_gpt_oss else 0,
        experts=experts,
    )


def gemma4(shape: Shape, values: Mapping[str, Any]) -> Shape:
    """Return the shape of Gemma 4: layers with a window and with full attention have heads of different sizes.

    The last layers of the small models take keys and values of earlier ones. There each layer also adds embeddings of
    its own (per-layer embeddings), from one table outside the layers.

    Args:
        shape: of a plain layer.
        values: of the config of the text.
    """
    types = values["layer_types"]
    if len(types) != shape.num_layers:
        raise ValueError(f"{len(types)} layer_types, {shape.num_layers} layers")
    if values.get("enable_moe_block"):
        raise ValueError("experts")
    first_shared = shape.num_layers - values.get("num_kv_shared_layers", 0)
    is_full = [kind == "full_attention" for kind in types]
    counts = Counter((full, i >= first_shared) for i, full in enumerate(is_full))
    # As transformers writes the config, or as the files of the models have it.
    given = values.get("per_layer_config") or {}
    of_full = next((given[key] for key in given if is_full[int(key)]), None)
    if of_full is None:
        of_full = {"head_dim": values.get("global_head_dim", 512)}
        if values.get("attention_k_eq_v") and values.get("num_global_key_value_heads"):
            of_full["num_key_value_heads"] = values["num_global_key_value_heads"]
    kinds = [(number, _of_gemma4(shape, values, *kind, of_full)) for kind, number in counts.items()]
    own = shape.num_layers * values.get("hidden_size_per_layer_input", 256)
    table = values.get("vocab_size_per_layer_input", 262_144) * own
    return replace(
        _mixed(kinds),
        root_linears=(Linear("per_layer_model_projection", shape.hidden_size, own),) if own else (),
        root_tables=table + own // shape.num_layers,
    )


def _of_gemma4(
    shape: Shape, values: Mapping[str, Any], is_full: bool, is_shared: bool, of_full: Mapping[str, int]
) -> Shape:
    """Return the shape of a layer of Gemma 4.

    Args:
        is_full: whether it has no window.
        is_shared: whether it takes keys and values of another layer.
        of_full: the sizes of the heads of a layer without a window.
    """
    h, own = shape.hidden_size, values.get("hidden_size_per_layer_input", 256)
    sizes = of_full if is_full else {}
    head_dim, kv_heads = sizes.get("head_dim", shape.head_dim), sizes.get("num_key_value_heads", shape.num_kv_heads)
    keys_are_values = is_full and values.get("attention_k_eq_v", False)
    size = shape.intermediate_size * (2 if is_shared and values.get("use_double_wide_mlp") else 1)
    linears = [Linear("q_proj", h, shape.num_heads * head_dim), Linear("o_proj", shape.num_heads * head_dim, h)]
    if not is_shared:
        names = ("k_proj",) if keys_are_values else ("k_proj", "v_proj")
        linears += [Linear(name, h, kv_heads * head_dim) for name in names]
    linears += _mlp(h, size)
    if own:
        linears.append(Linear("per_layer_input_gate", h, own, within="."))
        linears.append(Linear("per_layer_projection", own, h, within="."))
    return replace(
        shape,
        head_dim=head_dim,
        num_kv_heads=kv_heads,
        intermediate_size=size,
        num_norms=5 if own else 4,
        own_linears=tuple(linears),
        own_vectors=head_dim if is_shared else 2 * head_dim,
        # Norms of queries, keys and values compute in float32.
        kept_floats=shape.num_heads * head_dim + (0 if is_shared else 2 * kv_heads * head_dim),
        attended=None if is_full else values.get("sliding_window", 512),
    )


def _mixed(kinds: list[tuple[int, Shape]]) -> Shape:
    (_, largest), *others = sorted(kinds, key=lambda kind: -kind[1].layer_parameters)
    return replace(largest, others=tuple((n, replace(kind, name="", folder=None, tower=None)) for n, kind in others))


def _mlp(h: int, size: int) -> tuple[Linear, Linear, Linear]:
    return Linear("gate_proj", h, size), Linear("up_proj", h, size), Linear("down_proj", size, h)
