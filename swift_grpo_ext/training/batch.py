"""The training batch: what the rollout saw and generated, held against what training sees.

Templates of ms-swift write media in one way for training and in another for vLLM: a placeholder may
be a negative number in training. That is no difference. Where line breaks beside media differ, or
the rollout's prompt was cut, training is given the rollout's text (docs/promises.md, M3).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import torch
from swift.rlhf_trainers.utils import collate_to_grpo_micro_batch, encode_sample
from swift.utils import get_logger

from swift_grpo_ext.checks.rows import media_of
from swift_grpo_ext.media.encode import before_collating
from swift_grpo_ext.rollout.positions import Positions
from swift_grpo_ext.rollout.wire import Prompt
from swift_grpo_ext.upstream.encoding import only_sampled_tokens
from swift_grpo_ext.upstream.patches import replaced
from swift_grpo_ext.upstream.placeholders import placeholder_ids
from swift_grpo_ext.upstream.rows import KINDS

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch
    from swift.template import Template

    from swift_grpo_ext.config import RolloutGRPOConfig
    from swift_grpo_ext.ranks import RankGroup
    from swift_grpo_ext.rollout.sample import RolloutGKDSample, RolloutSample
    from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

logger = get_logger()

Decode = Callable[[list[int]], str]
Span = tuple[bool, list[int]]
"""Placeholders (True) or text, and the tokens."""

SHOWN = 5
"""Tokens that a message shows of each side."""

DROPOUTS = ("attention_dropout", "dropout", "activation_dropout", "hidden_dropout", "dropout_p")
"""Attributes from which transformers' layers call functional dropout."""

REMEDY = (
    "Give `swift rollout` the settings of the training: --template, --system, --max_length, "
    "MAX_PIXELS and the like. Where --max_length leaves no text between two media of a prompt, "
    "raise it, or have such prompts replaced with --truncation_strategy delete. Where ms-swift's "
    "template writes another prompt for vLLM than for training (docs/support.md), "
    "--rollout_mismatch warn trains on its prompt all the same."
)


TURNS_REMEDY = (
    "Training sees the messages and media that the scheduler leaves: its `step` has to return all "
    "images of a conversation in `rollout_infos['images']` (videos, audios alike), and to keep "
    "earlier turns as the engine saw them; --max_length must hold all turns. "
    "--rollout_mismatch warn trains all the same."
)

KEPT_TOKENS = "The template has to keep a completion's tokens as they are."
KEPT_TURNS = (
    "The scheduler has to leave each answer in the messages, and to return `response_token_ids` "
    "and `response_loss_mask` where it changes one."
)

POSITIONS_REMEDY = (
    "vLLM's model and transformers' count positions of media differently. Install releases that "
    "agree (docs/support.md); --rollout_mismatch warn trains all the same."
)


class DisagreementError(RuntimeError):
    """Rollout and training disagree about a sample: its prompt, positions, tokens or numbers."""


# --- the tokens of a sample ---


def logprobs_of(sample: RolloutSample) -> list[float]:
    return list(_flatten(sample.rollout_logprobs))


def trained_ids(sample: RolloutSample) -> list[int]:
    """Return the tokens that were sampled, without those that an environment put in between."""
    ids = list(_flatten(sample.response_token_ids))
    mask = list(_flatten(sample.response_loss_mask))
    return [i for i, is_own in zip(ids, mask, strict=True) if is_own] if mask else ids


def _flatten(values: Iterable[Any] | None) -> Iterator[Any]:
    """Yield the values of ms-swift's lists for each turn, and of single turns without lists."""
    return chain.from_iterable(v if isinstance(v, (list, tuple)) else [v] for v in values or ())


def kind_of_row(sample: RolloutSample) -> str:
    """Return what a row shows, in a word: `text`, `image`, `images`, `video`, `image+video` ..."""
    numbers = Counter(medium.kind for medium in media_of(sample))
    kinds = [kind + "s" * (numbers[kind] > 1) for kind in KINDS if numbers[kind]]
    return "+".join(kinds) or "text"


def check_counts(samples: Sequence[RolloutSample]) -> None:
    """Raise `DisagreementError` for a sample that lacks a log-probability for a token (M6)."""
    for sample in samples:
        num_tokens, num_logprobs = len(trained_ids(sample)), len(logprobs_of(sample))
        # ms-swift asks for none with `--use_vllm false`.
        if num_logprobs not in (0, num_tokens):
            raise DisagreementError(
                f"{sample.sample_id}: {num_tokens} sampled tokens and {num_logprobs} "
                "log-probabilities came back from the engine."
            )


def complete_teacher_views(
    samples: Sequence[RolloutSample | RolloutGKDSample], ranks: RankGroup
) -> None:
    """Let a teacher see the own prompt of each sample that has no `teacher_prompt` and no
    `teacher_images`, where any of the round has; every rank calls it.

    ms-swift 4.6 asks each micro-batch whether one of its samples has a teacher's view, and then
    encodes the views of all (gkd_helpers.py, `encode_gkd_samples`; grpo_trainer.py,
    `_collate_teacher_opsd_batch`): a TypeError where one has none, and passes of a teacher that
    ranks which share its weights do not make.
    """
    views = [sample.build_teacher_view() for sample in samples]
    if ranks.agree(not any(views)):
        return
    for sample in samples:
        if sample.teacher_messages is None:
            sample.teacher_messages = [dict(message) for message in sample.messages]


def collate(
    trainer: RolloutGRPOTrainer, samples: Sequence[RolloutSample]
) -> tuple[dict[str, Any], GRPOBatch]:
    """Make one batch of encoded samples, as ms-swift makes its micro-batches (4.6,
    grpo_trainer.py, `_prepare_batch_inputs`)."""
    with trainer._template_context(trainer.template):
        inputs, batch = collate_to_grpo_micro_batch(
            list(samples),
            trainer.template,
            device=trainer.accelerator.device,
            use_logits_to_keep=True,
        )
    inputs.pop("labels", None)  # given labels, models compute a loss of their own
    if "use_cache" in trainer.model_kwarg_keys:
        inputs["use_cache"] = False
    return inputs, batch


# --- prompts: training is given the rollout's text ---


@contextmanager
def encoding_for_training(template: Template, samples: Sequence[RolloutSample]) -> Iterator[None]:
    """Let ms-swift encode and collate samples so that training sees what their rollouts saw: no
    label but those of sampled tokens, and the rollout's own text.

    Args:
        template: of ms-swift; changed within the block only. Enter the block before the one in
            which ms-swift takes its `max_length` away.
        samples: those that are encoded and collated there, in this order.
    """
    placeholders, max_length = placeholder_ids(template), template.max_length
    waiting = deque(samples)

    def change(batch: list[dict[str, Any]]) -> None:
        for encoded in batch:
            # Rows of a teacher are collated among them; those keep the text that they have.
            if waiting and getattr(waiting[0], "encoded", None) is encoded:
                _give_rollouts_text(waiting.popleft(), template, placeholders, max_length)

    with before_collating(template, change), only_sampled_tokens(template, samples):
        yield


def encode_as_training(template: Template, samples: Sequence[RolloutSample]) -> None:
    """Encode generated samples as training sees them, each into its `encoded`.

    It does what ms-swift's trainer does within `encoding_for_training` (4.6, grpo_trainer.py,
    `_prepare_batch_inputs`), for whoever has samples and no training: `check` and `selftest`.
    """
    placeholders, max_length = placeholder_ids(template), template.max_length
    with only_sampled_tokens(template, samples), replaced(template, "max_length", None):
        for sample in samples:
            sample.encoded = encode_sample(sample, template)
            sample.encoded.pop("_extra_kwargs", None)
            _give_rollouts_text(sample, template, placeholders, max_length)


def _give_rollouts_text(
    sample: RolloutSample,
    template: Template,
    placeholders: Collection[int],
    max_length: int | None,
) -> None:
    """Give an encoded sample the line breaks of the prompt that its rollout saw, and the text that
    `--max_length` left of it."""
    # In a conversation each turn saw another prompt, which holds what was sampled before.
    prompts = rollout_prompts(sample)
    prompt = prompts[0].token_ids if len(prompts) == 1 else ()
    was_cut, encoded = may_be_cut(prompt, max_length), sample.encoded
    decode = template.tokenizer.decode
    changed = with_text_of(prompt, encoded, placeholders, decode, was_cut=was_cut)
    encoded.update(changed)
    if changed and not was_cut:
        logger.info_once(
            "ms-swift's template writes other line breaks beside media for training than for "
            "vLLM, or vLLM merges them (docs/support.md): training has those that the rollout saw.",
            hash_id="line_breaks",
        )


def may_be_cut(rollout: Sequence[int], max_length: int | None) -> bool:
    """Return whether `--max_length`, for which a medium is one token, may have cut the prompt of a
    rollout."""
    return max_length is not None and 0 < max_length <= len(rollout)


def with_text_of(
    rollout: Sequence[int],
    encoded: Mapping[str, Any],
    placeholders: Collection[int],
    decode: Decode,
    *,
    was_cut: bool,
) -> dict[str, Any]:
    """Return what changes of an encoded sample so that it has the text of the rollout's prompt.

    The policy was asked with the rollout's prompt: it is trained on that one. Media stay as they
    are encoded. Two prompts come of one row where

    - a template writes a line more beside an image for training (ms-swift's InternVL), or an engine
      merges line breaks (vLLM's Gemma3);
    - ms-swift cuts a prompt to `--max_length` for a rollout, and keeps all media and the last of
      its other tokens (4.6.0, template/base.py, `_truncate`); for training it encodes it whole.

    Args:
        rollout: token ids of the prompt, as the engine saw it.
        encoded: ms-swift's, with `input_ids`, `labels` (-100 in the prompt) and what else has one
            value for each token, as a list or a tensor [tokens].
        placeholders: ids that stand for media.
        decode: the text of token ids.
        was_cut: whether the rollout's prompt may be a cut one.

    Returns:
        New entries; none where the prompts are equal or differ in more than that, or where text
        tokens of the prompt do not share an entry's value.
    """
    ids, labels = encoded["input_ids"], encoded.get("labels")
    # A template that encodes into tensors keeps its text; `check_prompts_of` judges it.
    if not isinstance(ids, list) or not labels or ids[: len(rollout)] == list(rollout):
        return {}
    num_prompt = next((i for i, label in enumerate(labels) if label != -100), len(labels))
    ours, theirs = spans_of(rollout, placeholders), spans_of(ids[:num_prompt], placeholders)

    # Where a cut leaves no text between two media, numbers of runs differ too: side by side,
    # transformers takes two for one (5.19, `get_rope_index`).
    if len(ours) != len(theirs):
        return {}
    # A new text token takes what else the sample has for each token from an old one of the prompt.
    text_positions = [at for at, i in enumerate(ids[:num_prompt]) if not _is_media(i, placeholders)]
    new_ids: list[int] = []
    sources: list[int] = []
    """The position in `ids` from which each new token has its other values."""
    start = 0  # of the span in `ids`
    for (is_media, own), (_, other) in zip(ours, theirs, strict=True):
        end = start + len(other)
        if is_media:
            agree = _same_item(own, other)
            new_ids += other
            sources += range(start, end)
        else:
            # A cut takes tokens from the left.
            is_cut = was_cut and own == other[max(len(other) - len(own), 0) :]
            own_line, other_line = (decode(part).replace("\n", "") for part in (own, other))
            # Without media no template writes other line breaks.
            agree = is_cut or (len(ours) > 1 and own_line == other_line)
            new_ids += own
            sources += text_positions[:1] * len(own)
        if not agree:
            return {}
        start = end
    sources += range(num_prompt, len(ids))
    changed: dict[str, Any] = {"input_ids": [*new_ids, *ids[num_prompt:]]}
    if "length" in encoded:
        changed["length"] = len(sources)
    for name, values in encoded.items():
        # Pixels and grids of media have another length, and stay.
        is_list = isinstance(values, list) and len(values) == len(ids)
        if name == "input_ids" or not (is_list or getattr(values, "shape", None) == (len(ids),)):
            continue
        if len({float(values[at]) for at in text_positions}) > 1:
            return {}  # such as positions: which one a new token has, nobody knows
        changed[name] = [values[at] for at in sources] if is_list else values[sources]
    return changed


def _is_media(token_id: int, placeholders: Collection[int]) -> bool:
    return token_id < 0 or token_id in placeholders


def spans_of(ids: Sequence[int], placeholders: Collection[int]) -> list[Span]:
    """Return the runs of placeholders and of text, beginning with text."""
    runs = groupby(ids, key=lambda i: _is_media(i, placeholders))
    spans = [(is_media, list(run)) for is_media, run in runs]
    return spans if spans and not spans[0][0] else [(False, []), *spans]


def _same_item(ours: list[int], theirs: list[int]) -> bool:
    """Return whether two runs of placeholders differ in notation at most.

    Negative numbers stand for a whole item, however many tokens it takes.
    """
    # InternVL's frames are `<video>` to vLLM and `<IMG_CONTEXT>` to training, as many of them.
    alike = len(ours) == len(theirs) and len({*ours}) == len({*theirs}) == 1
    return ours == theirs or alike or min(theirs) < 0


# --- prompts and tokens: what still differs is an error ---


def check_batches(
    samples: Sequence[RolloutSample],
    micro_batches: Iterable[tuple[Sequence[RolloutSample], GRPOBatch, Mapping[str, Any]]],
    args: RolloutGRPOConfig,
    template: Template,
    ranks: RankGroup,
) -> None:
    """Raise `DisagreementError` on every rank where one trains on other prompts or tokens than its
    rollouts had (M3, M6); all ranks call it together, once a round.

    Args:
        samples: this rank's.
        micro_batches: of each, its samples, what both sides know of them, and the model's inputs.
    """
    fault = ""
    try:
        check_counts(samples)
        for chunk, batch, model_inputs in micro_batches:
            check_training_batch(chunk, batch, args, template, model_inputs)
    except DisagreementError as e:  # not raised yet: the others would wait for this rank
        fault = str(e)
    if faults := [*filter(None, ranks.all_gather(fault))]:
        raise DisagreementError(faults[0])


def check_training_batch(
    samples: Sequence[RolloutSample],
    batch: GRPOBatch,
    args: RolloutGRPOConfig,
    template: Template,
    model_inputs: Mapping[str, Any],
) -> None:
    """Raise `DisagreementError` where training sees other prompts (M3) or tokens (M6).

    Args:
        args: of the training; `--rollout_mismatch warn` makes one warning of other prompts.
        template: of the training, which has encoded the samples.
        model_inputs: made of the samples.
    """
    placeholders = placeholder_ids(template)
    positions = positions_in_training(samples, model_inputs)
    for sample, placed in zip(samples, positions, strict=True):
        try:
            check_prompts_of(sample, template, placeholders, REMEDY)
            for prompt in rollout_prompts(sample):
                if misplaced := first_misplaced(prompt.positions, placed):
                    raise DisagreementError(
                        f"{sample.sample_id}, a row of {kind_of_row(sample)}: the rollout and "
                        f"training place the same tokens otherwise, {misplaced}. {POSITIONS_REMEDY}"
                    )
        except DisagreementError as e:
            if args.rollout_mismatch == "stop":
                raise
            logger.warning_once(
                f"{e} Training goes on (--rollout_mismatch warn); its log-probabilities are of "
                "its own prompt, and rollout_gap says how far they lie apart. (Said once.)",
                hash_id="rollout_mismatch",
            )
    # ms-swift drops all log-probabilities of a batch where one sample's count disagrees, and goes
    # on without importance sampling (4.6, utils.py, `build_rollout_logps`). `--rollout_mismatch
    # warn` does not help: there is no telling which token has which.
    if batch.rollout_per_token_logps is not None or not all(map(logprobs_of, samples)):
        return
    for sample, mask in zip(samples, batch.completion_mask, strict=True):
        # ms-swift cuts the last off where there is one too many.
        count, num_sampled = int(mask.sum()), len(logprobs_of(sample))
        if num_sampled not in (count, count + 1):
            kept = KEPT_TURNS if len(rollout_prompts(sample)) > 1 else KEPT_TOKENS
            raise DisagreementError(
                f"{sample.sample_id}: {num_sampled} tokens were sampled, and {count} would "
                f"be trained on. {kept}"
            )


def rollout_prompts(sample: RolloutSample) -> list[Prompt]:
    """Return the prompt of each turn that was answered, as far as it is known."""
    return [prompt for prompt in sample.rollout_prompts if prompt.token_ids]


def check_prompts_of(
    sample: RolloutSample, template: Template, placeholders: Collection[int], remedy: str = ""
) -> None:
    """Raise `DisagreementError` where an encoded sample does not begin with the prompt that its
    rollout saw, if that is known: with that of each turn.

    Args:
        placeholders: ids that stand for media; in training negative ones do too.
        remedy: the message's last sentence.
    """
    training: list[int] = torch.as_tensor(sample.encoded["input_ids"]).flatten().tolist()
    spans, decode = spans_of(training, placeholders), template.tokenizer.decode
    prompts = rollout_prompts(sample)
    for turn, prompt in enumerate(prompts, 1):
        rollout = prompt.token_ids
        ours = spans_of(rollout, placeholders)
        agrees = len(spans) >= len(ours)
        for (is_media, own), (_, other) in zip(ours, spans, strict=False):
            if is_media:
                agrees &= _same_item(own, other)
                continue
            is_last = own is ours[-1][1]  # in training, completions follow it in the same span
            if own == (other[: len(own)] if is_last else other):
                continue
            # Training was given a prompt's line breaks beside media, but not those of later turns.
            line, other_line = (decode(part).replace("\n", "") for part in (own, other))
            starts = other_line.startswith(line) if is_last else other_line == line
            agrees &= len(prompts) > 1 and len(ours) > 1 and starts
        if agrees:
            continue
        pairs = zip(rollout, training, strict=False)
        shorter = min(len(rollout), len(training))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        seen, trained = (ids[first : first + SHOWN] for ids in (rollout, training))
        words = [repr(decode([i for i in ids if i >= 0])) for ids in (seen, trained)]
        where = f" in turn {turn}" if len(prompts) > 1 else ""
        advice = TURNS_REMEDY if remedy and where else remedy
        raise DisagreementError(
            f"{sample.sample_id}{where}: the rollout saw a prompt of {len(rollout)} tokens that "
            f"training does not begin with; they differ from token {first} on ({seen} against "
            f"{trained}, {words[0]} against {words[1]}). {advice}"
        )


def positions_in_training(
    samples: Sequence[RolloutSample], model_inputs: Mapping[str, Any]
) -> list[torch.Tensor | None]:
    """Return for each sample where training places its tokens: [3, tokens] in time, height and
    width; None of a model that counts them itself."""
    positions = model_inputs.get("position_ids")  # [3, rows, tokens] with M-RoPE
    if positions is None or positions.ndim != 3 or len(positions) != 3:
        return [None] * len(samples)
    positions = positions.cpu()
    mask = model_inputs.get("attention_mask")
    if mask is not None and mask.shape == positions.shape[1:]:
        return [positions[:, row, kept] for row, kept in enumerate(mask.cpu().bool())]
    if positions.shape[1] == len(samples):
        return list(positions.unbind(1))
    # `--padding_free true` packs all samples into one row.
    sizes = [len(sample.encoded["input_ids"]) for sample in samples]
    packed = positions[:, 0]
    return list(packed[:, : sum(sizes)].split(sizes, dim=1))


def first_misplaced(rollout: Positions | None, placed: torch.Tensor | None) -> str:
    """Say from which token on positions differ, in time, height and width; "" where none does or
    one side's are not known."""
    if rollout is None or placed is None or placed.shape[1] < rollout.shape[1]:
        return ""
    differs = (placed[:, : rollout.shape[1]].numpy() != rollout).any(0).nonzero()[0]
    if not len(differs):
        return ""
    at = int(differs[0])
    seen, trained = rollout[:, at].tolist(), placed[:, at].tolist()
    return (
        f"from token {at} of {rollout.shape[1]} on ({seen} against {trained} in time, height and "
        "width)"
    )


# --- dropout ---


def switch_off_dropout(model: torch.nn.Module) -> int:
    """Set every dropout of a model to 0, and return how many there were.

    Ratios of importance sampling compare two passes over the same tokens. Dropout draws a mask for
    each, so that they differ at equal weights (PPO's ratio, arXiv:1707.06347, is 1 there).
    """
    count = 0
    for module in model.modules():
        is_dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd)
        # Attentions and some MLPs call `functional.dropout` with a number of theirs.
        for name in ("p",) if is_dropout else DROPOUTS:
            value = getattr(module, name, None)
            if isinstance(value, float) and value > 0:
                count += 1
                setattr(module, name, 0.0)
    return count
