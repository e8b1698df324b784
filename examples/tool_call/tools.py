"""A tool that returns an image: the model calls it with a digit, and a wrong digit returns a crop.

A call is `<answer>7</answer>`, the only form that the tiny model knows. Load the tool with
`--external_plugins plugins/grpo_ext.py examples/tool_call/tools.py`. If servers run the
conversations, `swift rollout` loads the same two files (docs/tools.md).
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
"""The preset's stop string, which ends the call and the turn."""

CROPPED_SIDE = 0.75  # side of the crop, as a share of the image's side

CALL = re.compile(r"<answer>(\d)</answer>\Z")


def digit_of_call(text: str) -> str | None:
    """Return the digit of the call at the end of a turn; None without a call."""
    call = CALL.search(text)
    return call[1] if call else None


def crop(image: Image.Image) -> Image.Image:
    """Return the middle of an image, enlarged to the image's size."""
    width, height = image.size
    x, y = (1 - CROPPED_SIDE) / 2 * width, (1 - CROPPED_SIDE) / 2 * height
    return image.resize(image.size, Image.Resampling.BICUBIC, (x, y, width - x, height - y))


def as_base64(image: Image.Image) -> str:
    """Return a PNG in base64, which a request can send to a server."""
    image.save(content := io.BytesIO(), "png")
    return base64.b64encode(content.getvalue()).decode()


class DigitChecker(MultiTurnScheduler):
    """Answers a call with a wrong digit by a crop of the first image; a turn with the right digit
    or without a call is the last one."""

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        digit = digit_of_call(response_choice.message.content)
        is_over = digit is None or digit == infer_request.data_dict["solution"]
        return is_over or super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        digit = digit_of_call(response_choice.message.content)
        if not infer_request.images:
            answer = {"role": "tool", "content": f"{digit}: no. There is no image to look at."}
            infer_request.messages.append(answer)
            return {"infer_request": infer_request}
        # A row's image is a path, URL or base64; in the training it may also be a PIL image.
        cropped = crop(load_image(infer_request.images[0]))
        infer_request.images = [*infer_request.images, as_base64(cropped)]
        infer_request.messages.append({"role": "tool", "content": f"{digit}: no. <image>"})
        # Training needs all images of the conversation, in order.
        return {"infer_request": infer_request, "rollout_infos": {"images": infer_request.images}}


class DigitCall(ORM):
    """Give 0.2 if the last turn is only a call that the stop string ended, and add 1 if the call's
    digit is the row's `solution`."""

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
            rewards.append(0.2 * is_call + (digit_of_call(text) == truth))
        return rewards


multi_turns["digit_checker"] = DigitChecker
orms["digit_call"] = DigitCall
