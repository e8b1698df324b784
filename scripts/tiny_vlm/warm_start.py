"""The warm start: supervised training until the tiny model answers in form and is partly right.

GRPO needs a policy that is neither hopeless nor finished. Training stops when a sample for a
validation image is right with probability `TARGET_ACCURACY` (the most probable answer then is
right on about half of the images) and the form of the answer is all but certain over the whole
vocabulary. Smoothed digit labels keep the policy from being sure of its mistakes, so that the
samples of one prompt differ. Shapes are as in `examples`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import Qwen2_5_VLForConditionalGeneration

from tiny_vlm.compact_vocab import CompactVocab, expand, shrink
from tiny_vlm.examples import Examples
from tiny_vlm.quality import completion_log_probs, measure, split_log_probs

NUM_VALIDATION = 256
"""Rows at the end of the warm-start file that only decide when to stop."""

BATCH_SIZE = 32
LEARNING_RATE = 2e-3
NUM_RAMP_STEPS = 10
"""Steps over which the learning rate rises to its value."""

MAX_GRAD_NORM = 1.0
MAX_STEPS = 400
"""Four times what most seeds need."""

NUM_STEPS_BETWEEN_CHECKS = 5

TARGET_ACCURACY = 0.33
MAX_FORM_NATS = 0.005
"""Per token: all eight tokens of a sample are in form with a probability of 96% or more."""

LABEL_SMOOTHING = 0.1
"""Share of the digit's label that is spread over all ten digits."""


def training_loss(log_probs_BCV: Tensor, examples: Examples, indices_B: Tensor) -> Tensor:
    """Return the negative log-likelihood of the form, plus that of the digit given the form."""
    digits_B = examples.digits_N[indices_B]
    form_B, digit_B10 = split_log_probs(log_probs_BCV, examples, digits_B)
    digit_loss = cross_entropy(digit_B10, digits_B, label_smoothing=LABEL_SMOOTHING)
    return digit_loss - form_B.mean()


def batches(num_rows: int, seed: int) -> Iterator[Tensor]:
    """Yield full batches of row indices without end, one permutation of all rows after another."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(num_rows, generator=generator)
        yield from (batch for batch in order.split(BATCH_SIZE) if len(batch) == BATCH_SIZE)


def warm_start(model: Qwen2_5_VLForConditionalGeneration, examples: Examples, seed: int) -> int:
    """Train `model`, which knows the whole vocabulary, in place; return the number of steps."""
    num_training = len(examples) - NUM_VALIDATION
    vocab = CompactVocab.of(examples, model.config.text_config.vocab_size)
    compact = shrink(model, vocab, seed)
    # On one thread the result does not depend on the number of cores. Two threads save a third of a
    # step's 0.16 s, but beside another busy process they wait for each other and take ten times as
    # long.
    torch.set_num_threads(1)
    num_steps = train_until_warm(
        compact,
        vocab.encode_examples(examples.select(slice(num_training))),
        vocab.encode_examples(examples.select(slice(num_training, None))),
        vocab.log_multiplicity,
        seed,
    )
    expand(compact, model, vocab, seed)
    return num_steps


def train_until_warm(
    model: Qwen2_5_VLForConditionalGeneration,
    training: Examples,
    validation: Examples,
    log_multiplicity_V: Tensor,
    seed: int,
) -> int:
    """Train `model` on `training` until `validation` says stop; return the number of steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    ramp = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / NUM_RAMP_STEPS)
    )
    steps = zip(range(1, MAX_STEPS + 1), batches(len(training), seed), strict=False)
    quality = None
    with tqdm(steps, total=MAX_STEPS, desc="warm start (stops early)", unit="step") as progress:
        for step, indices_B in progress:
            model.train()
            log_probs_BCV = completion_log_probs(model, training, indices_B, log_multiplicity_V)
            optimizer.zero_grad()
            training_loss(log_probs_BCV, training, indices_B).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            ramp.step()
            if step % NUM_STEPS_BETWEEN_CHECKS == 0:
                quality = measure(model, validation, log_multiplicity_V)
                progress.set_postfix_str(f"accuracy {quality.sampled_accuracy:.2f}")
                is_right = quality.sampled_accuracy >= TARGET_ACCURACY
                if is_right and quality.form_nats <= MAX_FORM_NATS:
                    return step
    raise RuntimeError(
        f"the warm start did not converge: after {MAX_STEPS} steps it has {quality}, expected "
        f"sampled_accuracy >= {TARGET_ACCURACY} and form_nats <= {MAX_FORM_NATS}; "
        "try another --seed"
    )
