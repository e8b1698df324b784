"""The stop rule for ms-swift's templates and answers, the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift.infer_engine.protocol import ChatCompletionResponseChoice, RolloutOutput

from swift_grpo_ext.stops.rule import (
    Ending,
    StopReason,
    Stops,
    check_stops,
    find_ending,
    make_stops,
)

if TYPE_CHECKING:
    from swift.arguments import RLHFArguments
    from swift.template import StdTemplateInputs, Template
    from transformers import PreTrainedTokenizerBase

STOP_REASON = "stop_reason"
"""Key in `rollout_infos`, where reward functions find what stopped a completion."""


@dataclass
class StoppedChoice(ChatCompletionResponseChoice):
    """ms-swift's choice, and what stopped it."""

    stop_reason: StopReason = None


class TemplateStops:
    """Stop settings and cuts for one template of ms-swift; made once an engine."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._tokenizer = template.tokenizer
        self.special_ids = special_ids(self._tokenizer)
        self.end_ids = end_ids(template)

    def stops(
        self, words: Sequence[str], token_ids: Sequence[int] = (), *, include: bool = True
    ) -> Stops:
        """Return the settings of one request.

        Args:
            words: stop strings, those of the template and the engine behind the user's.
            token_ids: `--stop_token_ids`.
            include: `--include_stop_str_in_output`.
        """
        return make_stops(
            words,
            token_ids,
            special_ids=self.special_ids,
            end_ids=self.end_ids,
            include=include,
        )

    def find_ending(self, token_ids: Sequence[int], stops: Stops) -> Ending:
        return find_ending(token_ids, self.decode, stops)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return all of the tokens' text, special tokens too."""
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, spaces_between_special_tokens=False
        )
        return str(text)

    def text(
        self, token_ids: Sequence[int], ending: Ending, template_inputs: StdTemplateInputs | None
    ) -> str:
        """Return what ms-swift's template makes of a completion that ends so: its text. A few
        templates generate images, which are left as they are."""
        visible = list(token_ids[: ending.num_text_tokens])
        if visible and visible[-1] in self.end_ids:
            # The end of a stop string: the template would leave it out.
            prefix = self._template._get_response_prefix(template_inputs) or ""
            return prefix + ending.text(token_ids, self.decode)
        text = self._template.decode_generate_ids(visible, template_inputs=template_inputs)
        return text.removesuffix(ending.trailing_text) if isinstance(text, str) else text


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the tokenizer's special tokens, those of `--new_special_tokens` included, by their
    text."""
    named = [str(token) for token in tokenizer.all_special_tokens]
    ids = dict(zip(named, tokenizer.convert_tokens_to_ids(named), strict=True))
    added = {str(t): i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    return {**ids, **added}


def end_ids(template: Template) -> frozenset[int]:
    """Return the tokens with which the template ends a turn, which ms-swift leaves out of texts.

    An end that is several tokens is a stop string like another, and shows.
    """
    tokenizer, suffix = template.tokenizer, template.template_meta.suffix_stop
    if isinstance(suffix, str):
        special = special_ids(tokenizer).get(suffix)
        suffix = (
            tokenizer.encode(suffix, add_special_tokens=False) if special is None else [special]
        )
    ids = [tokenizer.eos_token_id, *(suffix if suffix and len(suffix) == 1 else ())]
    return frozenset(i for i in ids if isinstance(i, int))


def check_stop_settings(args: RLHFArguments) -> None:
    """Refuse settings that are wrong with any template, before a model is loaded.

    The model's directory is known already. Raises as `check_stops`.
    """
    size = 0
    if args.stop_token_ids:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.model_dir, trust_remote_code=True)
        size = len(tokenizer) + len(args.new_special_tokens)  # perhaps some are known already
    check_stops(args.stop_words or (), args.stop_token_ids, vocabulary_size=size)


def check_template_stops(args: RLHFArguments, template: Template) -> None:
    """Refuse stop settings that cannot be meant with this template; raises as `check_stops`."""
    check_stops(
        args.stop_words or (),
        args.stop_token_ids,
        vocabulary_size=len(template.tokenizer),
        response_prefix=template._get_response_prefix() or "",
    )


def with_stop_reason(
    choice: ChatCompletionResponseChoice,
    text: str,
    finish_reason: str | None,
    reason: StopReason,
) -> StoppedChoice:
    """Return ms-swift's choice with its text up to its end, and why it ended."""
    choice.message.content = text
    ended = {"finish_reason": finish_reason, "stop_reason": reason}
    return StoppedChoice(**{**vars(choice), **ended})


def record_stop_reason(output: RolloutOutput) -> RolloutOutput:
    """Put what stopped the last turn of a `RolloutOutput` where reward functions find it. Anything
    else (a failure) passes through."""
    choices = output.response.choices if isinstance(output, RolloutOutput) else ()
    if choices and isinstance(choices[0], StoppedChoice):
        output.rollout_infos[STOP_REASON] = choices[0].stop_reason
    return output
