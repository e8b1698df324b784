"""Applies the stop rule to the texts of ms-swift's templates, and checks stop settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swift_grpo_ext.checks.finding import SettingsError
from swift_grpo_ext.stops.rule import Ending, Stops

if TYPE_CHECKING:
    from swift.arguments import RLHFArguments
    from swift.template import StdTemplateInputs, Template

STOP_REASON = "stop_reason"  # key in `rollout_infos`


class TemplateStops:
    """Makes `Stops` and texts for one of ms-swift's templates."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._tokenizer = tokenizer = template.tokenizer
        # By text: the tokenizer's own special tokens (eos, pad) and `--new_special_tokens`.
        own = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        added = {str(t): i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.special_ids = {**dict(own), **added}
        # ms-swift hides the end of a turn in texts. An end of several tokens is an ordinary stop
        # string, and is shown.
        suffix = template.template_meta.suffix_stop
        if isinstance(suffix, str):
            special = self.special_ids.get(suffix)
            plain = tokenizer.encode(suffix, add_special_tokens=False)
            suffix = plain if special is None else [special]
        ends = [tokenizer.eos_token_id, *(suffix if suffix and len(suffix) == 1 else ())]
        self.end_ids = frozenset(i for i in ends if isinstance(i, int))  # eos may be None

    def stops(
        self, words: Sequence[str], token_ids: Sequence[int] = (), *, include: bool = True
    ) -> Stops:
        """Return a request's stops. Words that are special tokens become token ids, which need no
        decoding. `words` has the user's stop words first, and then the template's."""
        words = list(dict.fromkeys(words))  # a word may be in both
        named = {self.special_ids[word]: word for word in words if word in self.special_ids}
        return Stops(
            strings=tuple(word for word in words if word not in self.special_ids),
            tokens={i: named.get(i, i) for i in (*named, *token_ids, *sorted(self.end_ids))},
            invisible=self.end_ids,
            include=include,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the tokens' text, with special tokens."""
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, spaces_between_special_tokens=False
        )
        return str(text)

    def text(
        self, token_ids: Sequence[int], ending: Ending, template_inputs: StdTemplateInputs | None
    ) -> str:
        """Return a completion's text from ms-swift's template; a few templates return images."""
        visible = list(token_ids[: ending.num_text_tokens])
        if visible and visible[-1] in self.end_ids:
            # This token ends a stop string; the template would drop it.
            prefix = self._template._get_response_prefix(template_inputs) or ""
            text = prefix + self.decode(visible)
        else:
            text = self._template.decode_generate_ids(visible, template_inputs=template_inputs)
        return text.removesuffix(ending.trailing_text) if isinstance(text, str) else text


def check_stop_settings(args: RLHFArguments, template: Template | None = None) -> None:
    """Raise `SettingsError` for nonsensical stop settings (docs/promises.md, T5). Without a
    template, before a model is loaded, only check settings that are wrong with any template."""
    prefix = "" if template is None else template._get_response_prefix() or ""
    for word in args.stop_words or ():
        if word == "":
            raise SettingsError(
                "--stop_words holds an empty string, which would end every completion before its "
                "first token: leave it out."
            )
        if word in prefix:
            raise SettingsError(
                f"--stop_words {word!r} occurs in {prefix!r}, with which the template begins every "
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
