"""Training on the sampled tokens alone, also where a turn ended without an end of turn.

Symptom: in a conversation, a turn that a stop string ended (or the last possible token) is followed
in the prompt of the next turn by the template's `<|im_end|>` and line break. Training takes them
for sampled, though no policy drew them; and as their log-probabilities are missing, ms-swift takes
importance correction off for the whole micro-batch without a word.
Upstream: ms-swift 4.6, template/base.py (`_add_dynamic_eos`): made for answers that are given as
text, it labels every end of a turn that follows labelled tokens. rlhf_trainers/utils.py
(`build_rollout_logps`) gives up where counts differ.
Adaptation: while samples whose tokens are known are encoded, the template labels nothing by itself.
Can go when ms-swift labels token ids as they came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def only_sampled_tokens(template: Any, samples: Sequence[Any]) -> Iterator[None]:
    """Let `template` encode `samples` with no label but those of their tokens.

    Args:
        template: of ms-swift; changed within the block only.
        samples: to be encoded there. Where one has no token ids (a scheduler that returns none),
            answers are text, and ms-swift's labels are kept.
    """
    if not all(sample.response_token_ids for sample in samples):
        yield
        return
    template._add_dynamic_eos = _label_nothing
    try:
        yield
    finally:
        del template._add_dynamic_eos


def _label_nothing(*_: Any) -> None:
    pass
