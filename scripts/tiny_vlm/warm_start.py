"""Supervised training (the warm start) until the tiny model's answers have the right form and are
partly right.

GRPO needs a policy with room to improve. Training stops when a sample for a validation image is
right with probability `TARGET_ACCURACY` (the most probable answer is then right on about half of
the images) and the form of the answer is almost certain over the whole vocabulary. Smoothed digit
labels keep the policy unsure of its mistakes, so the samples of a prompt differ.

The data use few of the 151,936 ids. During training all unused ids share one embedding row and so
one logit u, and the normalizer over the whole vocabulary is exactly

    logsumexp(logits of the used ids, u + log(number of unused ids)).

Afterwards each unused id gets a copy of the shared row with a little noise. The ids then differ,
and the log-probabilities hardly change.

Shape legend: N rows, B rows of a batch, P patches of an image, D values of a patch, T prompt
tokens, C completion tokens, L = T + C, V ids that the model knows, U ids that occur.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

NUM_VALIDATION = 256  # the last rows of the warm-start file, which decide when to stop
BATCH_SIZE = 32  # rows; over the whole vocabulary their log-probabilities take 155 MB
LEARNING_RATE = 2e-3
NUM_RAMP_STEPS = 10  # steps over which the learning rate rises to its value
MAX_GRAD_NORM = 1.0
MAX_STEPS = 400  # four times what most seeds need
NUM_STEPS_BETWEEN_CHECKS = 5

TARGET_ACCURACY = 0.33
MAX_FORM_NATS = 0.005
"""This bounds each token: all eight of a sample then have the right form with probability 96%."""

LABEL_SMOOTHING = 0.1  # share of the digit's label that is spread over all ten digits
NOISE_STD = 0.01
"""This is the noise of each coordinate of an unused row. Hidden states have a norm of about 11, so
logits change by about 0.1, and the probability of all unused ids together by half a percent of
itself."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Encoded rows on the CPU, with one prompt and images of one size."""

    prompt_ids_T: Tensor  # with one id for each image token
    answer_ids_10C: Tensor  # the right completion for each digit, with `<|im_end|>`
    digit_position: int  # index in a completion where the ten answers differ
    pixels_NPD: Tensor  # the image processor's output, float32
    grid_thw: Tensor  # patches of one image along time, height and width, shape (1, 3)
    digits_N: Tensor  # the right digit of each row


def read_examples(path: Path, processor: Qwen2_5_VLProcessor) -> Examples:
    """Encode the rows of a file that `make_digits.py` wrote."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    [content] = {row["messages"][0]["content"] for row in rows}
    question = {"type": "text", "text": content.removeprefix("<image>")}
    message = {"role": "user", "content": [{"type": "image"}, question]}
    text = processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    pixels = []
    for row in tqdm(rows, desc="encode images", unit="image"):
        with Image.open(row["images"][0]) as image:
            encoded = processor(text=[text], images=[image], return_tensors="pt")
        pixels.append(encoded["pixel_values"])
    answers = [processor.tokenizer.encode(f"<answer>{d}</answer><|im_end|>") for d in range(10)]
    answer_ids_10C = torch.tensor(answers)
    [digit_position] = (answer_ids_10C != answer_ids_10C[0]).any(dim=0).nonzero().flatten().tolist()
    return Examples(
        prompt_ids_T=encoded["input_ids"][0],
        answer_ids_10C=answer_ids_10C,
        digit_position=digit_position,
        pixels_NPD=torch.stack(pixels),
        grid_thw=encoded["image_grid_thw"],
        digits_N=torch.tensor([int(row["solution"]) for row in rows]),
    )


def answer_log_probs(
    model: Qwen2_5_VLForConditionalGeneration,
    examples: Examples,
    indices_B: Tensor,
    log_multiplicity_V: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return values of the right completions.

    Args:
        log_multiplicity_V: log of the number of ids that each of the model's ids represents; None
            if each represents itself.

    Returns:
        Log-probabilities of the form (B,), log-probabilities of each digit given the form (B, 10),
        and whether each token is the most probable one (B, C).
    """
    answers_BC = examples.answer_ids_10C[examples.digits_N[indices_B]]
    ids_BL = torch.cat([examples.prompt_ids_T.expand(len(answers_BC), -1), answers_BC], dim=1)
    num_completion = answers_BC.shape[1]
    logits = model(
        input_ids=ids_BL,
        attention_mask=torch.ones_like(ids_BL),
        mm_token_type_ids=(ids_BL == model.config.image_token_id).int(),
        pixel_values=examples.pixels_NPD[indices_B].flatten(0, 1),
        image_grid_thw=examples.grid_thw.expand(len(ids_BL), -1),
        logits_to_keep=num_completion + 1,
        use_cache=False,
    ).logits[:, :-1]
    if log_multiplicity_V is not None:
        logits = logits + log_multiplicity_V
    log_probs_BCV = logits.log_softmax(dim=-1)
    log_p_BC = log_probs_BCV.gather(-1, answers_BC[..., None]).squeeze(-1)
    is_form_C = torch.arange(num_completion) != examples.digit_position
    digit_ids_10 = examples.answer_ids_10C[:, examples.digit_position]
    digit_B10 = log_probs_BCV[:, examples.digit_position][:, digit_ids_10]
    any_digit_B = digit_B10.logsumexp(dim=-1)
    form_B = log_p_BC[:, is_form_C].sum(dim=-1) + any_digit_B
    return form_B, digit_B10 - any_digit_B[:, None], log_probs_BCV.argmax(dim=-1) == answers_BC


@torch.no_grad()
def measure(
    model: Qwen2_5_VLForConditionalGeneration,
    examples: Examples,
    indices: Tensor,
    log_multiplicity_V: Tensor | None = None,
) -> dict[str, float]:
    """Return means over rows, computed from exact probabilities at temperature 1.

    Returns:
        `greedy_accuracy`: share of rows where greedy decoding gives the right answer;
        `sampled_accuracy`: probability that a sample is the right answer;
        `form_rate`: probability that a sample has the answer's form, with any digit;
        `form_nats`: -log p of the form for each token, with any digit in the digit's place.
    """
    model.eval()
    sums = torch.zeros(4)
    for indices_B in indices.split(BATCH_SIZE):
        form_B, digit_B10, is_best_BC = answer_log_probs(
            model, examples, indices_B, log_multiplicity_V
        )
        right_B = digit_B10.gather(-1, examples.digits_N[indices_B][:, None]).squeeze(-1)
        sums += torch.stack(
            [
                is_best_BC.all(dim=-1).float().sum(),
                (form_B + right_B).exp().sum(),
                form_B.exp().sum(),
                -form_B.sum() / is_best_BC.shape[1],
            ]
        )
    names = ("greedy_accuracy", "sampled_accuracy", "form_rate", "form_nats")
    return dict(zip(names, (sums / len(indices)).tolist(), strict=True))


def warm_start(model: Qwen2_5_VLForConditionalGeneration, examples: Examples, seed: int) -> int:
    """Train a model in place; return the number of steps."""
    # With one thread the result does not depend on the number of cores. Two threads save a third of
    # a step's 0.16 s, but take ten times as long beside another busy process.
    torch.set_num_threads(1)
    used_ids_U = torch.cat([examples.prompt_ids_T, examples.answer_ids_10C.flatten()]).unique()
    embedding, config = model.get_input_embeddings(), model.config
    whole = embedding.weight
    log_multiplicity_V = torch.zeros(len(used_ids_U) + 1)
    log_multiplicity_V[-1] = math.log(len(whole) - len(used_ids_U))
    names = ("image_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: getattr(config, name) for name in names}
    # Renumber: from here on, an id is an index of `used_ids_U`.
    for name, i in ids.items():
        setattr(config, name, int(torch.searchsorted(used_ids_U, i)))
    shared = torch.zeros(1, whole.shape[1])
    embedding.weight = Parameter(torch.cat([whole.detach()[used_ids_U], shared]))
    model.tie_weights()
    renumbered = replace(
        examples,
        prompt_ids_T=torch.searchsorted(used_ids_U, examples.prompt_ids_T),
        answer_ids_10C=torch.searchsorted(used_ids_U, examples.answer_ids_10C),
    )
    num_steps = train(model, renumbered, log_multiplicity_V, seed)
    trained = embedding.weight
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        whole.normal_(std=NOISE_STD, generator=generator).add_(trained[-1])
        whole[used_ids_U] = trained[:-1]
    embedding.weight = whole
    model.tie_weights()
    for name, i in ids.items():
        setattr(config, name, i)
    return num_steps


def train(
    model: Qwen2_5_VLForConditionalGeneration,
    examples: Examples,
    log_multiplicity_V: Tensor,
    seed: int,
) -> int:
    """Train on all rows except the validation rows; return the number of steps.

    The loss is the negative log-likelihood of the form, plus that of the digit given the form.

    Raises:
        RuntimeError: validation has not reached its targets after `MAX_STEPS` steps.
    """
    num_training = len(examples.digits_N) - NUM_VALIDATION
    validation = torch.arange(num_training, len(examples.digits_N))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    ramp = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / NUM_RAMP_STEPS)
    )
    steps = zip(range(1, MAX_STEPS + 1), batches(num_training, seed), strict=False)
    quality: dict[str, float] = {}
    with tqdm(steps, desc=f"warm start (to accuracy {TARGET_ACCURACY})", unit="step") as progress:
        for step, indices_B in progress:
            model.train()
            form_B, digit_B10, _ = answer_log_probs(model, examples, indices_B, log_multiplicity_V)
            digit_loss = cross_entropy(
                digit_B10, examples.digits_N[indices_B], label_smoothing=LABEL_SMOOTHING
            )
            optimizer.zero_grad()
            (digit_loss - form_B.mean()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            ramp.step()
            if step % NUM_STEPS_BETWEEN_CHECKS == 0:
                quality = measure(model, examples, validation, log_multiplicity_V)
                accuracy = f"accuracy {quality['sampled_accuracy']:.2f}"
                progress.set_postfix_str(accuracy, refresh=False)
                is_right = quality["sampled_accuracy"] >= TARGET_ACCURACY
                if is_right and quality["form_nats"] <= MAX_FORM_NATS:
                    return step
    raise RuntimeError(
        f"the warm start did not converge: {MAX_STEPS} steps gave {quality}, expected "
        f"sampled_accuracy >= {TARGET_ACCURACY} and form_nats <= {MAX_FORM_NATS}. "
        "Try another --seed"
    )


def batches(num_rows: int, seed: int) -> Iterator[Tensor]:
    """Yield full batches of row indices forever, from one permutation after another."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(num_rows, generator=generator)
        yield from (batch for batch in order.split(BATCH_SIZE) if len(batch) == BATCH_SIZE)
