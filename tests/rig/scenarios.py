"""A plugin for tests: rewards that depend on a sample's place in its group, or on its end,
schedulers that ask again, add images and say too much, planned faults, and an environment."""

import base64
import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
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


class Position(ORM):
    """Rewards differ within a group, whatever the policy answers."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [float(i) for i in range(len(completions))]


class Name(ORM):
    """Depends on a sample's name; each group has its own mean and spread."""

    def __call__(self, completions: list[str], request_id: list[str], **_: Any) -> list[float]:
        ids = map(SampleId.parse, request_id)
        return [float(i.index**2 * (1 + i.group) + i.step) for i in ids]


class Spelled(ORM):
    """Depends on the text; rewards differ within each group."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [sum(map(ord, text)) % 7 / 7 for text in completions]


class OddGroups(ORM):
    """Rewards differ in odd groups; dynamic sampling drops the even ones."""

    def __call__(self, completions: list[str], request_id: list[str], **_: Any) -> list[float]:
        return [float(i.group % 2 * i.index) for i in map(SampleId.parse, request_id)]


class Silent(ORM):
    """Gives even groups no reward."""

    def __call__(
        self, completions: list[str], request_id: list[str], **_: Any
    ) -> list[float | None]:
        return [0.25 if i.group % 2 else None for i in map(SampleId.parse, request_id)]


class Stopped(ORM):
    """1 where a stop ended the completion; records the arguments that it gets."""

    def __call__(
        self,
        completions: list[str],
        rollout_infos: list[dict[str, Any]],
        response_token_ids: list[Any],
        is_truncated: list[bool],
        **_: Any,
    ) -> list[float]:
        reasons = [infos["stop_reason"] for infos in rollout_infos]
        lines = zip(completions, reasons, response_token_ids, is_truncated, strict=True)
        with (Path(os.environ["RECORD_DIR"]) / "rewards.jsonl").open("a", encoding="utf-8") as f:
            f.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in lines)
        return [float(reason is not None) for reason in reasons]


class CosineOfDigits(CosineReward):
    """ms-swift's, with the digit's accuracy: its judge of mathematics is not installed here."""

    def __init__(self, args: Any = None) -> None:
        super().__init__(args, accuracy_orm=orms["digit_accuracy"]())


class AskAgain(MultiTurnScheduler):
    """Asks a second time, whatever the first answer is."""

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        return current_turn >= TURNS

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages.append({"role": "user", "content": "Say it again."})
        return {"infer_request": infer_request}


class ByGroup(AskAgain):
    """Group 0: the samples have 1, 2, 2 and 3 turns; the last two get a smaller copy of their image
    in turn 2. Its fault from round 2 on: it does not return that image to the training.
    Group 1: a tool's third answer is longer than the context of any engine here. The first sample
    has two turns and does not meet it. Group 2: two turns."""

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        name = SampleId.parse(infer_request.uuid)
        num_turns = ((1, 2, 2, 3), (2, 5, 5, 5), (2, 2, 2, 2))[name.group][name.index]
        is_last = current_turn >= num_turns
        if is_last:
            self._meet(name, current_turn)
        return is_last

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        name = SampleId.parse(infer_request.uuid)
        self._meet(name, current_turn)
        if name.group == 0 and name.index > 1 and current_turn == 1:
            image = load_image(infer_request.images[0])
            image.resize((56, 84)).save(content := BytesIO(), "png")
            closer = base64.b64encode(content.getvalue()).decode()
            infer_request.images = [*infer_request.images, closer]
            infer_request.messages.append({"role": "user", "content": "<image>And closer?"})
            infos = {"images": infer_request.images} if name.step < 2 else {}
            return {"infer_request": infer_request, "rollout_infos": infos}
        if name.group == 1:
            answer = "It says: " + "word " * (600 if current_turn == 3 else 5)
            infer_request.messages.append({"role": "tool", "content": answer})
            return {"infer_request": infer_request}
        return super().step(infer_request, response_choice, current_turn)

    def _meet(self, sample_id: SampleId, turn: int) -> None:
        """If `LOST` is set, the first server loses its engine in turn 2 of round 0, and a tool of
        round 2 does not return. `LOST` is the path of a file for the time of the loss."""
        name = replace(sample_id, turn=0).request_id
        if "LOST" in os.environ and (sample_id.step, turn) == (0, 2):
            with suppress(FileExistsError), Path(os.environ["LOST"]).open("x") as f:
                f.write(str(time.time()))
                manager = self.infer_engine.engine.engine_core.resources.engine_manager
                os.kill(manager.processes[0].pid, signal.SIGKILL)
        elif "LOST" in os.environ and (name, turn) == ("train-2.0-1-2", 1):
            time.sleep(1000)


class Examiner(Env):
    """Asks each sample of a group two questions, the first one its own."""

    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        self._index = SampleId.parse(config.uuid).index
        return f"<image>Question {self._index}: which digit?", {}, "You are examined."

    async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        done = len([m for m in action if m["role"] == "assistant"]) >= TURNS
        return "And the one after it?", float(self._index), done, {}

    async def close(self) -> None:
        pass


orms.update(position=Position, name=Name, odd_groups=OddGroups, silent=Silent, stopped=Stopped)
orms.update(spelled=Spelled, cosine=CosineOfDigits)
multi_turns.update(ask_again=AskAgain, by_group=ByGroup)
envs["examiner"] = Examiner
