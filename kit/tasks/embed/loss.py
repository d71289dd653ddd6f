"""The objective of an embedding model (bi-encoder): contrastive loss by GradCache.

The model returns the hidden states that are pooled to an embedding; see ``kit.model.pretrained``.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from kit.config.recipe import Recipe
from kit.data.feed.batches import MicroBatch, on_device
from kit.data.feed.feed import GlobalBatch
from kit.data.feed.mismatched import Mismatched
from kit.data.samples.dataset import Dataset
from kit.data.samples.samples import Samples
from kit.model.build import open_base_config
from kit.model.pretrained.heads import read_pooling
from kit.strategy.accelerator import Prepared
from kit.tasks.base import Batches, MeanLoss, Measured
from kit.tasks.embed.retrieval import Texts, gather, retrieval
from kit.train.policy import Policy
from kit.train.reference import without_gradients
from kit.train.step_loss import Terms

_GRADIENTS, _LOSSES = "gradients", "losses"  # of ``MicroBatch.per_sequence``: [n, h] and float64 [n]


class Embedding(MeanLoss):
    """Contrastive loss (InfoNCE) with in-batch negatives across the global batch, and hard negatives: the cross-entropy
    of each anchor's positive by cosine similarity / ``embed_temperature``. No negative of an anchor is the text of its
    positives, whichever row they are in, or its own text.

    van den Oord et al. 2018, https://arxiv.org/abs/1807.03748, equation 4. With ``matryoshka_dims`` the sum of it over
    the first components of each of these sizes: Kusupati et al. 2022, https://arxiv.org/abs/2205.13147, equation 1.

    GradCache: the loss is not a sum over micro-batches. ``begin_step`` computes all embeddings without gradients, the
    loss, and its gradient with respect to each embedding; then the term of a micro-batch is the product of both, whose
    gradients are those of the loss: Gao et al. 2021, https://arxiv.org/abs/2101.06983.
    """

    @classmethod
    def resolve(cls, recipe: Recipe, datasets: Sequence[Dataset]) -> Recipe:
        """See ``Objective.resolve``: the pooling of a model or an adapter that is an embedding model."""
        if "pooling" in recipe.model_fields_set:
            return recipe
        base, adapter = open_base_config(recipe), recipe.adapter_name_or_path
        own = read_pooling(adapter or base.name_or_path, None if adapter else getattr(base, "_commit_hash", None))
        return recipe.model_copy(update={"pooling": own or recipe.pooling})

    def begin_step(self, prepared: Prepared, batch: GlobalBatch) -> GlobalBatch:
        """Return the batch with the gradient of the loss for each embedding. Called by all ranks."""
        micro_batches = list(on_device(batch.micro_batches, prepared.accelerator.device))
        with without_gradients(prepared):
            own = [self.embeddings(prepared.model(**each.model_inputs()), each) for each in micro_batches]
        texts = gather(prepared, micro_batches, own)
        with torch.enable_grad():
            texts.vectors.requires_grad_()
            losses = self.losses(texts)
        assert texts.vectors.grad is not None
        gradients = texts.vectors.grad / batch.num_samples
        of_texts = torch.zeros_like(texts.roles, dtype=torch.float64)
        of_texts[texts.roles == 0] = losses
        known, start = [], texts.start
        for micro_batch in micro_batches:
            rows = slice(start, start + len(micro_batch.segments))
            start = rows.stop
            known.append(micro_batch.with_per_sequence(**{_GRADIENTS: gradients[rows], _LOSSES: of_texts[rows]}))
        return replace(batch, micro_batches=known)

    def embeddings(self, states: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Pool hidden states [S, h] to one vector for each sequence, float32 [n, h], not normalised."""
        states = states.float()
        if self.settings.pooling == "last" or not len(micro_batch.segments):
            return states
        lengths = torch.tensor([length for _, length, _ in micro_batch.segments], device=states.device)
        return torch.segment_reduce(states, "mean", lengths=lengths)

    def measure(self, policy: Policy, samples: Samples, mismatched: Mismatched | None, batches: Batches) -> Measured:
        """See ``Objective.measure``; all anchors are one batch."""
        own, seen = [], []
        for micro_batch in on_device(batches(samples, "evaluation"), policy.accelerator.device):
            own.append(self.embeddings(policy.model(**micro_batch.model_inputs()), micro_batch))
            seen.append(micro_batch)
        texts = gather(policy, seen, own)
        return Measured({"loss": float(self.losses(texts).mean()), **retrieval(texts)}, [], {})

    def losses(self, texts: Texts) -> torch.Tensor:
        """Return the loss of each anchor, float64 [A]; if the vectors require gradients, its sum adds to theirs."""
        vectors, roles = texts.vectors, texts.roles
        sizes = [vectors.shape[1], *(size for size in self.settings.matryoshka_dims if size < vectors.shape[1])]
        documents = torch.cat([torch.nonzero(roles == 1), torch.nonzero(roles > 1)])[:, 0]
        losses, start = [], 0
        for anchors, is_wanted, is_anchor in texts.relations(documents):
            own = torch.arange(len(anchors), device=vectors.device) + start
            start += len(anchors)
            left_out = (is_wanted | is_anchor).scatter(1, own[:, None], False)
            total = torch.zeros(len(own), dtype=torch.float64, device=vectors.device)
            for size in sizes:
                unit = F.normalize(vectors[:, :size], dim=1)
                similarities = (unit[anchors] @ unit[documents].T).masked_fill(left_out, -torch.inf)
                part = F.cross_entropy(similarities / self.settings.embed_temperature, own, reduction="none")
                if part.requires_grad:  # now, so that memory holds the similarities of one size and some anchors
                    part.sum().backward()
                total += part.detach()
            losses.append(total)
        return torch.cat(losses)

    def divisors(self, batch: GlobalBatch) -> Sequence[float]:
        """Return 1: the gradients are those of the mean."""
        return [1.0]

    def terms(self, losses: torch.Tensor, micro_batch: MicroBatch) -> Terms:
        """Return the product of the embeddings with the gradients, whose value says nothing; and the sum of losses."""
        vectors = self.embeddings(losses, micro_batch)
        gradients = micro_batch.per_sequence[_GRADIENTS].to(vectors)
        return [(vectors * gradients).sum()], micro_batch.per_sequence[_LOSSES].sum()[None]
