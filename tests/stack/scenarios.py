"""A plugin for tests: conversations of two turns, an environment, rewards of known variance."""

from __future__ import annotations

from typing import Any

from swift.rewards import ORM, orms
from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns

from swift_grpo_ext.sampling.seeding import SampleId

TURNS = 2


class AskAgain(MultiTurnScheduler):
    """Asks a second time, whatever the first answer was."""

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        return current_turn >= TURNS

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages.append({"role": "user", "content": "Say it again."})
        return {"infer_request": infer_request}


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


class OddGroups(ORM):
    """Groups 1 and 2 of a round have variance, group 0 has none: dynamic sampling throws it out."""

    def __call__(self, completions: list[str], request_id: list[str], **_: Any) -> list[float]:
        sample_ids = [SampleId.parse(name) for name in request_id]
        return [float(sample_id.index) if sample_id.group else 0.0 for sample_id in sample_ids]


multi_turns["ask_again"] = AskAgain
envs["examiner"] = Examiner
orms["odd_groups"] = OddGroups
