"""The stop rule for ms-swift's templates and answers, the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swift_grpo_ext.checks.finding import SettingsError
from swift_grpo_ext.stops.rule import Ending, Stops

if TYPE_CHECKING:
    from swift.arguments import RLHFArguments
    from swift.template import StdTemplateInputs, Template

STOP_REASON = "stop_reason"  # key in `rollout_infos`: what stopped a completion


class TemplateStops:
    """Stop settings and cuts for one template of ms-swift."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._tokenizer = tokenizer = template.tokenizer
        # By their text: the tokenizer's own (eos, pad), and those of `--new_special_tokens`.
        named = [str(token) for token in tokenizer.all_special_tokens]
        ids = dict(zip(named, tokenizer.convert_tokens_to_ids(named), strict=True))
        added = {str(t): i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.special_ids = {**ids, **added}
        # ms-swift leaves the end of a turn out of texts. An end of several tokens is a stop string
        # like another, and shows.
        suffix = template.template_meta.suffix_stop
        if isinstance(suffix, str):
            special = self.special_ids.get(suffix)
            plain = tokenizer.encode(suffix, add_special_tokens=False)
            suffix = plain if special is None else [special]
        ends = [tokenizer.eos_token_id, *(suffix if suffix and len(suffix) == 1 else ())]
        self.end_ids = frozenset(i for i in ends if isinstance(i, int))  # without an eos it is None

    def stops(
        self, words: Sequence[str], token_ids: Sequence[int] = (), *, include: bool = True
    ) -> Stops:
        """Sort the settings of a request into strings to find in the text, and token ids: a word
        that is a special token needs no decoding. `words` are the user's, then the template's."""
        words = list(dict.fromkeys(words))  # a user's may be the template's, too
        named = {self.special_ids[word]: word for word in words if word in self.special_ids}
        return Stops(
            strings=tuple(word for word in words if word not in self.special_ids),
            tokens={i: named.get(i, i) for i in (*named, *token_ids, *sorted(self.end_ids))},
            hidden=self.end_ids,
            include=include,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the tokens' text, special tokens too."""
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, spaces_between_special_tokens=False
        )
        return str(text)

    def text(
        self, token_ids: Sequence[int], ending: Ending, template_inputs: StdTemplateInputs | None
    ) -> str:
        """Return the text that ms-swift's template makes of a completion; a few templates make
        images, which stay as they are."""
        visible = list(token_ids[: ending.num_text_tokens])
        if visible and visible[-1] in self.end_ids:
            # The end of a stop string: the template would leave it out.
            prefix = self._template._get_response_prefix(template_inputs) or ""
            text = prefix + self.decode(visible)
        else:
            text = self._template.decode_generate_ids(visible, template_inputs=template_inputs)
        return text.removesuffix(ending.trailing_text) if isinstance(text, str) else text


def check_stop_settings(args: RLHFArguments, template: Template | None = None) -> None:
    """Refuse stop settings that cannot be meant (docs/promises.md, T5): without a template, before
    a model is loaded, those that are wrong with any.

    Raises:
        SettingsError: names the setting, the value received, what was expected and the remedy.
    """
    prefix = "" if template is None else template._get_response_prefix() or ""
    for word in args.stop_words or ():
        if word == "":
            raise SettingsError(
                "--stop_words holds an empty string, which would end every completion before its "
                "first token: leave it out."
            )
        if word in prefix:
            raise SettingsError(
                f"--stop_words {word!r} stands in {prefix!r}, with which the template begins every "
                "response: each text would hold it from the start. Take another stop string, or "
                "another --response_prefix or --enable_thinking."
            )
    if not args.stop_token_ids:
        return
    if template is not None:
        num_tokens = len(template.tokenizer)
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.model_dir, trust_remote_code=True)
        # An upper bound: the tokenizer may know some of the new ones.
        num_tokens = len(tokenizer) + len(args.new_special_tokens)
    outside = [i for i in args.stop_token_ids if not 0 <= i < num_tokens]
    if outside:
        raise SettingsError(
            f"--stop_token_ids {' '.join(map(str, args.stop_token_ids))}: {outside[0]} is no "
            f"token; the tokenizer has the ids 0 to {num_tokens - 1}. Ask it for the id: "
            "tokenizer.convert_tokens_to_ids('...')."
        )
