"""Training on a vocabulary of 151,936 ids at the price of the few that occur.

All ids that occur in no prompt and no answer share one embedding row, so they have one logit u.
The full-vocabulary normalizer is then exactly

    logsumexp(logits of the used ids, u + log(number of unused ids)),

and a model with one row per used id and one more for the rest is trained instead. Afterwards each
unused id gets a copy of the shared row, with a little noise: the ids stay distinguishable, and the
log-probabilities hardly move.
"""

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from tiny_vlm.architecture import build_model
from tiny_vlm.examples import Examples

NOISE_STD = 0.01
"""Per coordinate of an unused row. Hidden states have a norm of about 11 here, so that logits move
by about 0.1, and the probability of all unused ids together by half a percent of itself."""

EMBEDDING_KEYS = ("model.language_model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, kw_only=True)
class CompactVocab:
    """It holds the used ids in ascending order; the compact id of each is its index here."""

    used_ids_U: Tensor
    num_ids: int
    """The whole vocabulary has so many."""

    @classmethod
    def of(cls, examples: Examples, num_ids: int) -> "CompactVocab":
        """Return the vocabulary of the prompt and of all ten answers."""
        ids = torch.cat([examples.prompt_ids_T, examples.answer_ids_10C.flatten()])
        return cls(used_ids_U=ids.unique(sorted=True), num_ids=num_ids)

    @property
    def size(self) -> int:
        """Return the number of compact ids: the used ones, and one for all the others."""
        return len(self.used_ids_U) + 1

    def encode(self, ids: Tensor) -> Tensor:
        """Return the compact ids of used ids, in the shape of `ids`."""
        compact = torch.searchsorted(self.used_ids_U, ids)
        assert torch.equal(self.used_ids_U[compact], ids), "an id outside the used ones"
        return compact

    @property
    def log_multiplicity(self) -> Tensor:
        """Return the logarithm of the number of ids that each compact id stands for."""
        log_multiplicity = torch.zeros(self.size)
        log_multiplicity[-1] = math.log(self.num_ids - len(self.used_ids_U))
        return log_multiplicity

    def encode_examples(self, examples: Examples) -> Examples:
        """Return the same rows in compact ids."""
        return replace(
            examples,
            prompt_ids_T=self.encode(examples.prompt_ids_T),
            answer_ids_10C=self.encode(examples.answer_ids_10C),
        )


def shrink(
    model: Qwen2_5_VLForConditionalGeneration, vocab: CompactVocab, seed: int
) -> Qwen2_5_VLForConditionalGeneration:
    """Copy `model` over the compact ids; the shared row starts at zero."""
    config = copy.deepcopy(model.config)
    config.text_config.vocab_size = vocab.size
    for name in ("image_token_id", "vision_start_token_id", "vision_end_token_id"):
        setattr(config, name, int(vocab.encode(torch.tensor(getattr(config, name)))))
    # No video occurs: its id may be any that no prompt holds.
    config.video_token_id = vocab.size - 1
    compact = build_model(config, seed)
    _copy_all_but_embedding(model, compact)
    with torch.no_grad():
        rows = compact.get_input_embeddings().weight
        rows[:-1] = model.get_input_embeddings().weight[vocab.used_ids_U]
        rows[-1] = 0.0
    return compact


def expand(
    compact: Qwen2_5_VLForConditionalGeneration,
    model: Qwen2_5_VLForConditionalGeneration,
    vocab: CompactVocab,
    seed: int,
) -> None:
    """Write the trained weights of `compact` into `model`, over the whole vocabulary."""
    _copy_all_but_embedding(compact, model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        source = compact.get_input_embeddings().weight
        target = model.get_input_embeddings().weight
        target.normal_(std=NOISE_STD, generator=generator).add_(source[-1])
        target[vocab.used_ids_U] = source[:-1]


def _copy_all_but_embedding(
    source: Qwen2_5_VLForConditionalGeneration, target: Qwen2_5_VLForConditionalGeneration
) -> None:
    state = {k: v for k, v in source.state_dict().items() if k not in EMBEDDING_KEYS}
    missing, unexpected = target.load_state_dict(state, strict=False)
    assert set(missing) <= set(EMBEDDING_KEYS), missing
    assert not unexpected, unexpected
