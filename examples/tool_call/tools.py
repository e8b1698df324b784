"""A tool that returns an image: the model calls it with a digit, and a wrong one brings a crop.

The tiny model knows one form, `<answer>7</answer>`: here it is the call. A plugin of its own:
`--external_plugins plugins/grpo_ext.py examples/tool_call/tools.py`. `swift rollout` takes the same
two files where it leads the conversations (docs/tools.md).
"""

from __future__ import annotations

import base64
import io
import re
from typing import Any

from PIL import Image
from swift.rewards import ORM, orms
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns
from swift.template import load_image

STOP = "</answer>"
"""The preset's stop string: a call ends with it, and so does the turn."""

SHOWN = 0.75
"""Part of each side of an image that its crop shows."""

CALL = re.compile(r"<answer>(\d)</answer>\Z")


def called_with(text: str) -> str | None:
    """The digit that the tool is called with at the end of a turn; None without a call."""
    call = CALL.search(text)
    return call[1] if call else None


def closer(image: Image.Image) -> Image.Image:
    """The middle of an image, enlarged to its size."""
    width, height = image.size
    x, y = (1 - SHOWN) / 2 * width, (1 - SHOWN) / 2 * height
    return image.resize(image.size, Image.Resampling.BICUBIC, (x, y, width - x, height - y))


def as_base64(image: Image.Image) -> str:
    """PNG in base64, which a request can take to a server."""
    image.save(content := io.BytesIO(), "png")
    return base64.b64encode(content.getvalue()).decode()


class DigitChecker(MultiTurnScheduler):
    """Ends with the call whose digit is the row's `solution`; a wrong one is answered with a crop
    of the row's first image."""

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        digit = called_with(response_choice.message.content)
        is_over = digit is None or digit == infer_request.data_dict["solution"]
        return is_over or super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        digit = called_with(response_choice.message.content)
        if not infer_request.images:  # a row of words alone
            told = {"role": "tool", "content": f"{digit}: no. There is no image to look at."}
            infer_request.messages.append(told)
            return {"infer_request": infer_request}
        # A path, a URL or base64, whatever the row has; an image of PIL's in the training alone.
        crop = closer(load_image(infer_request.images[0]))
        infer_request.images = [*infer_request.images, as_base64(crop)]
        infer_request.messages.append({"role": "tool", "content": f"{digit}: no. <image>"})
        # Training sees what is told here: all images of the conversation, in their order.
        return {"infer_request": infer_request, "rollout_infos": {"images": infer_request.images}}


class DigitCall(ORM):
    """0.2 where the last turn is nothing but a call that its stop string ended, 1 more where the
    call's digit is the row's `solution`."""

    def __call__(
        self,
        completions: list[str],
        solution: list[str],
        rollout_infos: list[dict[str, Any]],
        **_: Any,
    ) -> list[float]:
        rewards = []
        for text, truth, infos in zip(completions, solution, rollout_infos, strict=True):
            is_call = infos["stop_reason"] == STOP and CALL.fullmatch(text) is not None
            rewards.append(0.2 * is_call + (called_with(text) == truth))
        return rewards


multi_turns["digit_checker"] = DigitChecker
orms["digit_call"] = DigitCall
