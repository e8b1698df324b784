"""How a model answers the digit question, from exact probabilities instead of samples.

Shapes are as in `examples`; B rows of a batch, V ids that the model knows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from tiny_vlm.examples import Examples

EVAL_BATCH_SIZE = 32
"""Rows; over the whole vocabulary their log-probabilities take 155 MB."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """It holds means over rows, of probabilities over the whole vocabulary at temperature 1."""

    greedy_accuracy: float
    """Share of rows whose right answer is the most probable token at every position."""

    sampled_accuracy: float
    """Probability that a sample is the right answer."""

    form_rate: float
    """Probability that a sample has the answer's form, whichever digit it names."""

    form_nats: float
    """-log p of the form per token; the digit's token counts with "some digit"."""


def completion_log_probs(
    model: Qwen2_5_VLForConditionalGeneration,
    examples: Examples,
    indices_B: Tensor,
    log_multiplicity_V: Tensor | None = None,
) -> Tensor:
    """Return the log-probabilities at each position of right completions, shape (B, C, V).

    `log_multiplicity_V` is the logarithm of how many ids each of the model's ids stands for; None
    where each stands for itself.
    """
    ids_BL = examples.input_ids(indices_B)
    grids = examples.grid_thw.expand(len(ids_BL), -1)
    num_completion = examples.answer_ids_10C.shape[1]
    logits = model(
        input_ids=ids_BL,
        attention_mask=torch.ones_like(ids_BL),
        mm_token_type_ids=(ids_BL == model.config.image_token_id).int(),
        pixel_values=examples.pixels_NPD[indices_B].flatten(0, 1),
        image_grid_thw=grids,
        logits_to_keep=num_completion + 1,
        use_cache=False,
    ).logits[:, :-1]
    if log_multiplicity_V is not None:
        logits = logits + log_multiplicity_V
    return logits.log_softmax(dim=-1)


def split_log_probs(
    log_probs_BCV: Tensor, examples: Examples, digits_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the answer's form, (B,), and of each digit given it, (B, 10)."""
    answers_BC = examples.answer_ids_10C[digits_B]
    log_p_BC = log_probs_BCV.gather(-1, answers_BC[..., None]).squeeze(-1)
    is_form_C = torch.arange(answers_BC.shape[1]) != examples.digit_position
    digit_B10 = log_probs_BCV[:, examples.digit_position][:, examples.digit_ids_10]
    any_digit_B = digit_B10.logsumexp(dim=-1)
    form_B = log_p_BC[:, is_form_C].sum(dim=-1) + any_digit_B
    return form_B, digit_B10 - any_digit_B[:, None]


@torch.no_grad()
def measure(
    model: Qwen2_5_VLForConditionalGeneration,
    examples: Examples,
    log_multiplicity_V: Tensor | None = None,
) -> Quality:
    """Return the model's quality on all rows of `examples`."""
    model.eval()
    num_completion = examples.answer_ids_10C.shape[1]
    sums = torch.zeros(4)
    for indices_B in torch.arange(len(examples)).split(EVAL_BATCH_SIZE):
        digits_B = examples.digits_N[indices_B]
        log_probs_BCV = completion_log_probs(model, examples, indices_B, log_multiplicity_V)
        form_B, digit_B10 = split_log_probs(log_probs_BCV, examples, digits_B)
        is_best_BC = log_probs_BCV.argmax(dim=-1) == examples.answer_ids_10C[digits_B]
        right_B = digit_B10.gather(-1, digits_B[:, None]).squeeze(-1)
        sums += torch.stack(
            [
                is_best_BC.all(dim=-1).float().sum(),
                (form_B + right_B).exp().sum(),
                form_B.exp().sum(),
                -form_B.sum() / num_completion,
            ]
        )
    greedy, sampled, form_rate, form_nats = (sums / len(examples)).tolist()
    return Quality(
        greedy_accuracy=greedy,
        sampled_accuracy=sampled,
        form_rate=form_rate,
        form_nats=form_nats,
    )
