"""A plugin for tests: conversations of two turns, an environment, and rewards that follow from a
sample's place or end."""

from __future__ import annotations

import base64
import json
import os
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from swift.rewards import ORM, orms
from swift.rewards.orm import CosineReward
from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns
from swift.template.vision_utils import load_image

from swift_grpo_ext.sampling.seeding import SampleId

TURNS = 2


class AskAgain(MultiTurnScheduler):
    """Asks a second time, whatever the first answer was."""

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        return current_turn >= TURNS

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages.append({"role": "user", "content": "Say it again."})
        return {"infer_request": infer_request}


class LookCloser(MultiTurnScheduler):
    """Puts in the image once more, smaller, and asks again; forgets to say so to the training."""

    says_so = False

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        return current_turn >= TURNS

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        image = load_image(infer_request.images[0])
        image.resize((56, 84)).save(content := BytesIO(), "png")
        closer = base64.b64encode(content.getvalue()).decode()
        infer_request.images = [*infer_request.images, closer]
        infer_request.messages.append({"role": "user", "content": "<image>And closer?"})
        infos = {"images": infer_request.images} if self.says_so else {}
        return {"infer_request": infer_request, "rollout_infos": infos}


class ByIndex(LookCloser):
    """Has turns by the sample's place in its group: one; two; two and three with an image."""

    says_so = True

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        return current_turn >= (1, 2, 2, 3)[SampleId.parse(infer_request.uuid).index]

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        is_closer = current_turn == 1 and SampleId.parse(infer_request.uuid).index > 1
        ask = super().step if is_closer else partial(AskAgain.step, self)
        return ask(infer_request, response_choice, current_turn)


class LongTool(AskAgain):
    """Its tool's third answer is longer than any engine here has room for, but for the first sample
    of each group, which has two turns."""

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        return current_turn >= (2 if SampleId.parse(infer_request.uuid).index == 0 else 5)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        said = "It says: " + "word " * (600 if current_turn == 3 else 5)
        infer_request.messages.append({"role": "tool", "content": said})
        return {"infer_request": infer_request}


class OtherRules(AskAgain):
    """Asks again under another system prompt."""

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages[0] = {"role": "system", "content": "Be quick."}
        return super().step(infer_request, response_choice, current_turn)


class Examiner(Env):
    """Each sample of a group gets a question of its own, and a second one."""

    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        self._index = SampleId.parse(config.uuid).index
        return f"<image>Question {self._index}: which digit?", {}, "You are examined."

    async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        done = len([m for m in action if m["role"] == "assistant"]) >= TURNS
        return "And the one after it?", float(self._index), done, {}

    async def close(self) -> None:
        pass


class Position(ORM):
    """No two samples of a group are alike to the loss, whatever the policy answers."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [float(i) for i in range(len(completions))]


class Name(ORM):
    """Follows from a sample's name; each group has a mean and a spread of its own."""

    def __call__(self, completions: list[str], request_id: list[str], **_: Any) -> list[float]:
        ids = map(SampleId.parse, request_id)
        return [float(i.index**2 * (1 + i.group) + i.step) for i in ids]


class OddGroups(ORM):
    """Tells the samples of odd groups apart; dynamic sampling drops the even ones."""

    def __call__(self, completions: list[str], request_id: list[str], **_: Any) -> list[float]:
        return [float(i.group % 2 * i.index) for i in map(SampleId.parse, request_id)]


class Silent(ORM):
    """Says nothing of even groups."""

    def __call__(
        self, completions: list[str], request_id: list[str], **_: Any
    ) -> list[float | None]:
        return [0.25 if i.group % 2 else None for i in map(SampleId.parse, request_id)]


class Stopped(ORM):
    """1 where a stop ended the completion; writes down what it is told of each."""

    def __call__(
        self,
        completions: list[str],
        rollout_infos: list[dict[str, Any]],
        response_token_ids: list[Any],
        is_truncated: list[bool],
        **_: Any,
    ) -> list[float]:
        reasons = [infos["stop_reason"] for infos in rollout_infos]
        told = zip(completions, reasons, response_token_ids, is_truncated, strict=True)
        with (Path(os.environ["RECORD_DIR"]) / "rewards.jsonl").open("a", encoding="utf-8") as f:
            f.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in told)
        return [float(reason is not None) for reason in reasons]


class CosineOfDigits(CosineReward):
    """ms-swift's, by the digit: its own judge of mathematics is a package that is not here."""

    def __init__(self, args: Any = None) -> None:
        super().__init__(args, accuracy_orm=orms["digit_accuracy"]())


multi_turns.update(
    ask_again=AskAgain,
    look_closer=LookCloser,
    by_index=ByIndex,
    long_tool=LongTool,
    other_rules=OtherRules,
)
envs["examiner"] = Examiner
orms.update(position=Position, name=Name, odd_groups=OddGroups, silent=Silent, stopped=Stopped)
orms["cosine"] = CosineOfDigits
