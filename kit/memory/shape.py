"""A model's shape as numbers: the sizes of its layers, and how many parameters they have.

Promises: the numbers of parameters are exact.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kit.config.expressions import matches_any


@dataclass(frozen=True)
class Linear:
    """A linear module of a decoder layer."""

    name: str  # the last part of its name
    inputs: int
    outputs: int
    bias: bool = False
    within: str = ""  # the module of the layer that holds it, ".": the layer; empty: attention or MLP, by its name

    @property
    def path(self) -> str:
        """Its name within the layer."""
        return f"{self.within or ('mlp' if self.is_in_mlp else 'self_attn')}.{self.name}".lstrip(".")

    @property
    def num_weights(self) -> int:
        """The number of its weights, without the bias."""
        return self.inputs * self.outputs

    @property
    def is_in_mlp(self) -> bool:
        """Whether it belongs to the feed-forward part, else to attention."""
        return self.name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The fused experts of a decoder layer, of which a router chooses some for each token, and that router."""

    number: int
    per_token: int
    inputs: int
    size: int  # of the feed-forward part of each
    has_bias: bool = False  # experts and router
    in_mxfp4: bool = False  # in the model's own files, and with qlora

    @property
    def products(self) -> tuple[Linear, Linear]:
        """The matrices of one expert, by the names of the tensors that have those of all."""
        up = Linear("experts.gate_up_proj", self.inputs, 2 * self.size, within="mlp")
        return up, Linear("experts.down_proj", self.size, self.inputs, within="mlp")

    @property
    def num_weights(self) -> int:
        """Weights of the matrices of all experts: what is quantised."""
        return self.number * sum(each.num_weights for each in self.products)

    @property
    def num_vectors(self) -> int:
        """The other parameters: of the router, and biases."""
        biases = self.number * (2 * self.size + self.inputs + 1) if self.has_bias else 0
        return self.number * self.inputs + biases

    @property
    def multiplied(self) -> int:
        """Weights that a token is multiplied by: those of its experts, and of the router."""
        return self.per_token * self.num_weights // self.number + self.number * self.inputs


@dataclass(frozen=True, kw_only=True)
class Tower:
    """An encoder of images or sound: layers over patches, and a projector of their features to tokens."""

    layers: "Shape"  # without a vocabulary
    part: str  # of the model that they are: "vision", else "audio"
    parameters: Mapping[str, int]  # by part: of encoders, and of their projectors
    linear_weights: int  # of linear modules of all of them: what is quantised
    patches_per_token: int
    values_per_patch: int  # of its pixels
    patches_seen: int | None = None  # that one attends to; None: those of its image
    image_tokens: int  # of an image, at most
    token_pixels: int | None = None  # of a token, if the size of an image decides how many it has

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        return sum(self.parameters.values())

    @property
    def around_layers(self) -> int:
        """Parameters that are in none of its layers."""
        return self.num_parameters - self.layers.num_layers * self.layers.layer_parameters


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a decoder-only language model, and of its vision tower, if it has one.

    All layers are equal, but for those of ``others``, none of which has more parameters.
    """

    name: str
    folder: Path | None  # with the config.json; None for a shape made from a number of parameters
    num_layers: int
    hidden_size: int
    intermediate_size: int  # of experts: of all those that a token reaches
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None  # the longest input in tokens; None: no limit
    tied: bool  # whether input embedding and output head are one matrix
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output
    mlp_bias: bool = False
    fused: bool = False  # whether q, k, v are one module, and gate, up another (Phi 3)
    num_norms: int = 2  # of hidden_size, in a layer
    norm_of_heads: str = ""  # "head": q and k have a norm of head_dim each; "all": of all their heads together
    caps_logits: bool = False  # whether logits pass through tanh before the loss
    caps_scores: bool = False  # the same of attention's scores
    has_sinks: bool = False  # whether softmax of eager attention has a further score for each head (gpt-oss)
    has_mask: bool = False  # whether attention adds a mask [T, T] to scores, which keeps images apart (Pixtral)
    eager: bool = False  # whether the family takes eager attention only
    gated: bool = True  # whether the feed-forward part multiplies two tensors
    layer_norm: bool = False  # norms with a bias
    rotates_views: bool = False  # of one tensor of queries, keys and values, in float32 (Qwen's towers)
    supports_sequence_parallelism: bool = True  # whether sequence parallelism works: no sliding window, no dynamic RoPE
    tower: Tower | None = None
    experts: Experts | None = None  # in place of a feed-forward part of linear modules
    others: tuple[tuple[int, "Shape"], ...] = ()  # layers of other kinds: how many, and a shape with their sizes
    own_linears: tuple[Linear, ...] = ()  # of a layer, where they are not those of Llama
    own_vectors: int = 0  # further parameters of a layer that are in no linear module
    kept_values: int = 0  # further values that a layer keeps for its backward pass, in the dtype of computation
    kept_floats: int = 0  # the same in float32
    attended: int | None = None  # positions that a token attends to at most; None: all before it
    root_linears: tuple[Linear, ...] = ()  # linear modules outside the layers
    root_tables: int = 0  # other parameters of the text outside the layers: tables for each layer

    @property
    def kinds(self) -> tuple[tuple[int, "Shape"], ...]:
        """The kinds of layers: how many there are of each, and a shape with their sizes. The largest comes first."""
        return ((self.num_layers - sum(number for number, _ in self.others), self), *self.others)

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """The linear modules of one layer."""
        if self.own_linears:
            return self.own_linears
        h, f, q, kv = self.hidden_size, self.intermediate_size, self.query_size, self.kv_size
        if self.fused:
            return (
                Linear("qkv_proj", h, q + 2 * kv, self.qkv_bias),
                Linear("o_proj", q, h, self.output_bias),
                Linear("gate_up_proj", h, 2 * f, self.mlp_bias),
                Linear("down_proj", f, h, self.mlp_bias),
            )
        return (
            Linear("q_proj", h, q, self.qkv_bias),
            Linear("k_proj", h, kv, self.qkv_bias),
            Linear("v_proj", h, kv, self.qkv_bias),
            Linear("o_proj", q, h, self.output_bias),
            *((Linear("gate_proj", h, f, self.mlp_bias),) if self.gated else ()),
            Linear("up_proj", h, f, self.mlp_bias),
            Linear("down_proj", f, h, self.mlp_bias),
        )

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys of all heads, and of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_linear_weights(self) -> int:
        """Weights of the linear modules of one layer."""
        return sum(linear.num_weights for linear in self.linears)

    @property
    def layer_matrices(self) -> int:
        """Weights of the linear modules and experts of one layer: what is quantised."""
        return self.layer_linear_weights + (self.experts.num_weights if self.experts else 0)

    @property
    def layer_multiplied(self) -> int:
        """Weights of one layer that a token is multiplied by."""
        return self.layer_linear_weights + (self.experts.multiplied if self.experts else 0)

    @property
    def layer_vectors(self) -> int:
        """Parameters of one layer outside its matrices: norms and biases."""
        biases = sum(linear.outputs for linear in self.linears if linear.bias)
        of_heads = {"": 0, "head": 2 * self.head_dim, "all": self.query_size + self.kv_size}[self.norm_of_heads]
        norms = self.num_norms * (2 if self.layer_norm else 1) * self.hidden_size
        of_experts = self.experts.num_vectors if self.experts else 0
        return norms + of_heads + biases + of_experts + self.own_vectors

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer."""
        return self.layer_matrices + self.layer_vectors

    @property
    def linear_weights(self) -> int:
        """Weights of the linear modules of all layers, and of the root."""
        return self._of_layers("layer_linear_weights")

    @property
    def matrices(self) -> int:
        """The same with those of experts: what is quantised."""
        return self._of_layers("layer_matrices")

    @property
    def multiplied(self) -> int:
        """The same with those that a token is multiplied by."""
        return self._of_layers("layer_multiplied")

    @property
    def in_mxfp4(self) -> int:
        """Weights that the model's own files hold in MXFP4."""
        return sum(n * kind.experts.num_weights for n, kind in self.kinds if kind.experts and kind.experts.in_mxfp4)

    def _of_layers(self, name: str) -> int:
        of_layers = sum(number * getattr(kind, name) for number, kind in self.kinds)
        return int(of_layers) + sum(linear.num_weights for linear in self.root_linears)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding, and as many of the output head."""
        return self.vocab_size * self.hidden_size

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embedding, head if it is another matrix, last norm, and ``root_*``."""
        others = self.root_tables + sum(linear.num_weights for linear in self.root_linears)
        return (1 if self.tied else 2) * self.embedding_parameters + self.hidden_size + others

    @property
    def num_parameters(self) -> int:
        """All parameters of the model."""
        of_tower = self.tower.num_parameters if self.tower else 0
        return sum(number * kind.layer_parameters for number, kind in self.kinds) + self.root_parameters + of_tower

    def adapter_parameters(self, rank: int, targets: tuple[str, ...] | None = None, of_token: bool = False) -> int:
        """Parameters of the LoRA adapters of all layers.

        Args:
            targets: names of modules, and of the tensors of experts; None: all modules.
            of_token: only those that a token is multiplied by: not of all experts.
        """
        sizes = (
            number * sum(each.inputs + each.outputs for each in kind.adapted(targets)) for number, kind in self.kinds
        )
        of_experts = (
            number
            * (kind.experts.per_token if of_token else kind.experts.number)
            * sum(each.inputs + each.outputs for each in kind.adapted_products(targets))
            for number, kind in self.kinds
            if kind.experts
        )
        of_root = sum(
            each.inputs + each.outputs for each in self.root_linears if targets is None or each.name in targets
        )
        return rank * (sum(sizes) + sum(of_experts) + of_root)

    def names_in_layers(self, targets: Sequence[str]) -> list[set[str]]:
        """Return for each layer, kind by kind, the ``name`` of each matrix that one of ``targets`` names.

        These are linear modules, which ``all-linear`` names, and the tensors of experts.
        """
        decoder = "model.language_model" if self.tower else "model"
        layers = [kind for number, kind in self.kinds for _ in range(number)]
        everything = "all-linear" in targets
        return [
            {
                each.name
                for each in (*kind.linears, *(kind.experts.products if kind.experts else ()))
                if (everything and each in kind.linears) or matches_any(f"{decoder}.layers.{i}.{each.path}", targets)
            }
            for i, kind in enumerate(layers)
        ]

    def adapted(self, targets: tuple[str, ...] | None) -> Iterator[Linear]:
        """The linear modules of a layer that ``targets`` names; None: all."""
        return (linear for linear in self.linears if targets is None or linear.name in targets)

    def adapted_products(self, targets: tuple[str, ...] | None) -> list[Linear]:
        """The products of each expert of a layer that ``targets`` names."""
        return [each for each in self.experts.products if each.name in (targets or ())] if self.experts else []
