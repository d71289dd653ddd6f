"""What a plan is made for: a model's shape, a method, GPUs and their strategy, and the size of a micro-batch.

Plain numbers, so that thousands of them can be tried in a second.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from kit.config.expressions import matches_any
from kit.config.optimisers import OPTIMISERS
from kit.config.recipe import Recipe
from kit.config.settings.method import MethodSettings
from kit.config.settings.objective import DECLARED, PLAIN, ObjectiveName
from kit.memory.shape import Shape
from kit.memory.sizes import GRADIENT_BYTES, WEIGHT_BYTES, num_checkpoints
from kit.model.layers.checkpointing import Checkpointing
from kit.strategy.strategies import DDP, SINGLE, Strategy
from kit.strategy.topology import Precision
from kit.tasks.spec import TaskSpec


def machines_with_copies(num_gpus: int, gpus_per_machine: int) -> int:
    """Return the number of machines if each can hold a copy, sharded over its GPUs; else 1."""
    machines, rest = divmod(num_gpus, gpus_per_machine)
    return machines if gpus_per_machine > 1 and not rest else 1


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One configuration of a run."""

    shape: Shape
    method: Literal["full", "lora", "qlora"]
    strategy: Strategy = SINGLE
    num_gpus: int = 1  # over all machines
    gpus_per_machine: int = 8
    num_replicas: int = 1  # copies of a sharded model (hybrid sharding); 1: sharded over all GPUs
    sequence_parallel_size: int = 1  # size of the sequence-parallel group (Ulysses)
    rows: int = 1  # samples of a micro-batch, or packs; a pair is one of them
    length: int = 2048  # tokens of a sequence at most: of a sample, or of each half of a pair
    micro_batches: int = 1  # of a step, on each GPU
    packing: bool = False
    gradient_checkpointing: Checkpointing = False
    activation_offload: bool = False  # of the inputs of checkpointed layers, to host memory
    tiled_mlp: bool = False  # MLP of checkpointed layers in sequence chunks (ALST)
    generated_rows: int = 0  # generation batch size of rollouts
    new_tokens: int = 0  # of a completion at most, with tools of each turn
    turns: int = 1  # of a completion at most
    rollout_steps: int = 1  # updates per rollout (num_iterations)
    keeps_initial_weights: bool = False  # initial weights in host memory, as the reference model
    objective: ObjectiveName = PLAIN
    teacher: Shape | None = None  # of the frozen teacher, online or offline
    teacher_in_4bit: bool = False
    teacher_top_k: int = 0  # top-k of offline distillation; 0: online, the teacher stays in memory
    precompute_reference: bool = False  # before the first step, where the method would allow to do it in each step
    lora_r: int = 16
    lora_targets: tuple[str, ...] | None = None  # None: all linear modules
    lora_dropout: bool = False
    optim: str = "adamw_torch_fused"
    device_memory: int | None = None  # bytes of a GPU, which decide the chunks of the loss head; None: not known
    mixed_precision: Precision = "bf16"  # of the Accelerate config; "no": float32
    eager: bool = False  # attention that holds the scores of all pairs of tokens
    sync_each_batch: bool | None = None  # None: with FSDP, not with DDP
    async_save: bool = True
    save_only_model: bool = False
    num_checkpoints: int | None = 3  # on the disk at once; None: all are kept
    publishes: bool = False  # all weights, to a vLLM server
    file_bytes: int = 2  # of a weight in the model's own files, bf16 as a rule
    torch_compile: bool | Literal["auto"] = False
    # Bytes of a logit of a chunk, where autograd differentiates a loss of its own; 0: plain cross-entropy.
    logit_bytes: int = 0
    fp8: bool = False  # changes neither what is held nor, as far as formulas know, how long it takes
    image_tokens: int = 0  # of a row at most, or of a pack
    trained_parts: tuple[str, ...] = ("language",)  # of a model that reads images, with method full
    pure_bf16: bool = False  # weights and optimiser states in bf16, without a float32 copy: adamw_bf16
    # What this kit does not do. With these the same formulas describe other kits' published runs.
    # whole: all logits at once; kept chunks: bf16 logits of all chunks, for the backward pass
    loss: Literal["chunks", "whole", "kept chunks"] = "chunks"

    def __post_init__(self) -> None:
        assert self.strategy.replicates == (self.num_replicas > 1)

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        shape: Shape,
        strategy: Strategy = SINGLE,
        num_gpus: int = 1,
        gpus_per_machine: int = 8,
        num_replicas: int = 1,
        teacher: Shape | None = None,
        sequence_parallel_size: int = 1,
    ) -> "Workload":
        """Return what ``recipe`` would run. Unlike in a run, the micro-batch need not divide the global batch."""
        targets = None
        if recipe.lora_target_modules != "all-linear":
            targets = tuple(shape.names_in_layers(recipe.lora_target_modules)[0])
        if recipe.declared.head != "lm":  # no lm_head beside the embedding; the new head has a row or a few
            shape = replace(shape, tied=True)
        return cls(
            shape=shape,
            method=recipe.method,
            strategy=strategy,
            num_gpus=num_gpus,
            gpus_per_machine=gpus_per_machine,
            num_replicas=num_replicas,
            sequence_parallel_size=sequence_parallel_size,
            rows=recipe.micro_batch_size,
            length=recipe.max_length,
            micro_batches=max(
                1, recipe.global_batch_size * sequence_parallel_size // (recipe.micro_batch_size * num_gpus)
            ),
            packing=recipe.packing,
            gradient_checkpointing=recipe.gradient_checkpointing != "auto" and recipe.gradient_checkpointing,
            activation_offload=recipe.activation_offload,
            tiled_mlp=recipe.tiled_mlp,
            # Experts are not compiled, nor linear attention, which not all layers of a model have.
            torch_compile=recipe.torch_compile if not (shape.experts or shape.others) else False,
            logit_bytes=recipe.logit_bytes,
            fp8=recipe.fp8,
            generated_rows=recipe.eval_batch_size if recipe.rolls_out and not recipe.vllm_server_base_url else 0,
            publishes=bool(recipe.vllm_server_base_url) and recipe.method == "full",
            new_tokens=recipe.max_new_tokens,
            turns=recipe.max_turns if recipe.has_tools else 1,
            rollout_steps=recipe.num_iterations,
            keeps_initial_weights=recipe.keeps_initial_weights,
            objective=recipe.objective,
            teacher=teacher,
            teacher_in_4bit=recipe.teacher_in_4bit,
            teacher_top_k=recipe.teacher_top_k,
            precompute_reference=recipe.precompute_reference or bool(recipe.adapter_name_or_path),
            lora_r=recipe.lora_r,
            lora_targets=targets,
            lora_dropout=recipe.lora_dropout > 0,
            optim=recipe.optim,
            pure_bf16=recipe.optim == "adamw_bf16",
            image_tokens=_image_tokens(recipe, shape),
            trained_parts=tuple(recipe.train_only or ("language",)),
            eager=recipe.attn_implementation == "eager" or (shape.eager and recipe.attn_implementation == "auto"),
            sync_each_batch=recipe.sync_each_batch,
            async_save=recipe.async_save,
            save_only_model=recipe.save_only_model,
            num_checkpoints=num_checkpoints(recipe),
        )

    def with_method(self, method: Literal["full", "lora", "qlora"]) -> "Workload":
        """Return this workload with another method. Adapters are trained in float32."""
        if method == "full" or self.optim != "adamw_bf16":
            return replace(self, method=method)
        return replace(self, method=method, optim="adamw_torch_fused", pure_bf16=False)

    @property
    def as_teacher(self) -> "Workload | None":
        """The same workload with the teacher as its model, which is frozen; None: there is none."""
        method: Literal["qlora", "lora"] = "qlora" if self.teacher_in_4bit else "lora"
        return replace(self, shape=self.teacher, method=method, lora_targets=(), teacher=None) if self.teacher else None

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient: float32 where micro-batches are added up, and under DDP; else as its weight."""
        return 2 if self.pure_bf16 and self.micro_batches == 1 and self.strategy != DDP else GRADIENT_BYTES

    @property
    def config(self) -> str:
        """The name of the Accelerate config."""
        return self.strategy.config

    @property
    def declared(self) -> TaskSpec:
        """What is known of the objective by its name."""
        return DECLARED[self.objective]

    @property
    def has_lm_head(self) -> bool:
        """Whether there are logits of the vocabulary, else a classification or embedding head."""
        return self.declared.head == "lm"

    @property
    def sequences(self) -> int:
        """Sequences of a sample: chosen and rejected of a pair, query and positive, else one."""
        return self.declared.sequences_per_sample

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample at most, and of a pack: of a pair both halves."""
        return self.sequences * self.length

    @property
    def width(self) -> int:
        """Tokens of a row of the model's input. Both halves of a pair lie in one pack; else each has a row."""
        return self.sample_tokens if self.packing else self.length

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one GPU, padding included."""
        return -(-self.rows * self.sample_tokens // self.sequence_parallel_size)

    @property
    def num_data_ranks(self) -> int:
        """Data-parallel ranks: groups of GPUs with their own samples."""
        return self.num_gpus // self.sequence_parallel_size

    @property
    def precomputes_reference(self) -> bool:
        """Whether the reference model's passes are made before the first step, see ``Recipe.precomputes_reference``."""
        return self.declared.has_reference and (self.precompute_reference or self.method == "full")

    @property
    def passes(self) -> int:
        """No-grad forward passes over the tokens of a step that each step makes.

        The reference's over its samples, and the model's and the reference's over as many mismatched sequences
        (``kit.data.feed.mismatched``).
        """
        of_mismatched = int(self.declared.has_mismatched)
        of_reference = int(self.declared.has_reference and not self.precomputes_reference) * (1 + of_mismatched)
        return self.declared.num_passes + of_mismatched + of_reference

    @property
    def first_passes(self) -> int:
        """No-grad forward passes over all samples before the first step, of mismatched ones as ``passes``."""
        return 1 + int(self.declared.has_mismatched) if self.precomputes_reference else 0

    @property
    def fuses(self) -> bool:
        """Whether layers are compiled, and so keep fewer tensors; by ``auto`` on GPUs with bf16 only."""
        is_older = self.torch_compile == "auto" and self.mixed_precision == "fp16"
        is_left_out = is_older or self.tiled_mlp or (self.method == "qlora" and self.sharded)
        return bool(self.torch_compile) and not is_left_out

    @property
    def is_half(self) -> bool:
        """Whether values that pass through a layer have 16 bits: bf16, or fp16."""
        return self.mixed_precision != "no"

    @property
    def compute_bytes(self) -> int:
        """Bytes of a frozen weight, or of a value that passes through a layer."""
        return 2 if self.is_half else 4

    @property
    def weight_bytes(self) -> int:
        """Bytes of a trained weight, as the optimiser holds it."""
        return 2 if self.pure_bf16 else WEIGHT_BYTES

    @property
    def moment_bytes(self) -> int:
        """Bytes of the moments of all trained weights, which an optimiser keeps in 8 bits or as the weights."""
        known = OPTIMISERS[self.optim]
        number = known.num_moments * self.trainable_parameters
        if known.moments_of_matrices is not None:
            number += (known.moments_of_matrices - known.num_moments) * self.trained_in_matrices
        return number * (1 if known.in_8_bits else self.weight_bytes)

    @property
    def sharded(self) -> bool:
        """Whether each GPU keeps only a part of the weights."""
        return self.strategy.shards

    @property
    def num_shards(self) -> int:
        """GPUs over which weights, gradients and optimiser state are divided; 1 if they are not."""
        return self.num_gpus // self.num_replicas if self.sharded else 1

    @property
    def num_machines(self) -> int:
        """Machines that have all the GPUs."""
        return -(-self.num_gpus // self.gpus_per_machine)

    @property
    def trained_in_matrices(self) -> int:
        """Trained weights of the layers' linear modules, or of adapters on them: what muon updates."""
        return self.adapter_parameters or self.shape.linear_weights

    @property
    def adapter_parameters(self) -> int:
        """Parameters of all adapters; 0 for ``full``."""
        if self.method == "full":
            return 0
        return self.shape.adapter_parameters(self.lora_r, self.lora_targets)

    @property
    def adapter_of_token(self) -> int:
        """The parameters of adapters that a token is multiplied by: not those of all experts."""
        return 0 if self.method == "full" else self.shape.adapter_parameters(self.lora_r, self.lora_targets, True)

    @property
    def trained_in_tower(self) -> int:
        """Parameters of the tower and its projector that train."""
        if (tower := self.shape.tower) is None or self.method != "full":
            return 0
        return sum(size for part, size in tower.parameters.items() if part in self.trained_parts)

    @property
    def frozen_in_tower(self) -> int:
        """Parameters of the tower and its projector that do not train."""
        return self.shape.tower.num_parameters - self.trained_in_tower if self.shape.tower else 0

    @property
    def trainable_parameters(self) -> int:
        """Parameters that the optimiser updates."""
        if self.method == "full":
            return self.shape.num_parameters - self.frozen_in_tower
        return self.adapter_parameters

    @property
    def patches(self) -> int:
        """Patches of images in a micro-batch, at most."""
        return (
            self.rows
            * self.sequences
            * self.image_tokens
            * (self.shape.tower.patches_per_token if self.shape.tower else 0)
        )

    @property
    def of_tower(self) -> "Workload | None":
        """The layers of the tower over the patches of a micro-batch, as if they were all of a model."""
        if not self.patches or not self.shape.tower:
            return None
        trains = self.shape.tower.part in self.trained_parts and self.method == "full"
        own = {"method": "full"} if trains else {"method": "lora", "lora_targets": ()}
        changed: dict[str, Any] = {
            "rows": 1,
            "length": self.patches,
            "objective": PLAIN,
            "packing": False,
            "eager": False,
        }
        return replace(self, shape=self.shape.tower.layers, image_tokens=0, teacher=None, **own, **changed)


def _image_tokens(recipe: Recipe, shape: Shape) -> int:
    """Tokens of a row that stand for an image, if each has one that is as large as it may be."""
    if (tower := shape.tower) is None:
        return 0
    of_image = tower.image_tokens
    if tower.token_pixels and recipe.max_pixels:
        of_image = recipe.max_pixels // tower.token_pixels
    return min(recipe.max_length, of_image)


def uncovered(settings: MethodSettings, shape: Shape) -> list[str]:
    """Return the settings that are given and change memory in a way that no formula of this package describes."""
    keys = "use_dora lora_modules_to_save trainable_tokens new_tokens freeze train_only adapter_name_or_path qat"
    found = [key for key in (*keys.split(), "adapter_options") if getattr(settings, key)]
    if (
        shape.tower
        and settings.method == "full"
        and {"language"} <= set(settings.train_only or ()) <= {"vision", "audio", "projector", "language"}
    ):
        found.remove("train_only")
    found += ["adapter_type"] if settings.method != "full" and settings.adapter_type != "lora" else []
    targets = settings.lora_target_modules
    if settings.method != "full" and targets != "all-linear":
        first, *others = shape.names_in_layers(targets)
        tables = [name for name in ("model.embed_tokens", "lm_head") if matches_any(name, targets)]
        if not first or tables or any(layer != first for layer in others):
            found.append("lora_target_modules")
    return found
