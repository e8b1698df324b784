"""A plugin for tests: schedulers that ask again, add images and say too much, with planned events,
and an environment.

The environment variable `TURNS` names a folder. There a test writes `plan.json`, a list of events,
each with a step, a turn, a `kind` and perhaps the name of a sample. An event happens once over all
servers of the folder, and writes its time to a file named by its kind.
"""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns
from swift.template.vision_utils import load_image

from swift_grpo_ext.sampling.seeding import SampleId

TURNS = 2


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
        """Let the events of this turn happen."""
        if "TURNS" not in os.environ:
            return
        folder, name = Path(os.environ["TURNS"]), replace(sample_id, turn=0).request_id
        with (folder / "met.jsonl").open("a") as f:
            f.write(json.dumps([name, turn]) + "\n")
        for event in json.loads((folder / "plan.json").read_text()):
            here = {"step": sample_id.step, "turn": turn, "sample": name}
            kind = event["kind"]
            if {**here, **event} == {**here, "kind": kind}:
                with suppress(FileExistsError), (folder / kind).open("x") as f:
                    f.write(str(time.time()))
                    f.flush()
                    self._happen(kind)

    def _happen(self, kind: str) -> None:
        if kind == "engine":
            manager = self.infer_engine.engine.engine_core.resources.engine_manager
            os.kill(manager.processes[0].pid, signal.SIGKILL)
        elif kind == "server":
            server = multiprocessing.parent_process()  # as tests start it, not the system's parent
            assert server is not None
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
        else:
            time.sleep(1000)  # a tool that does not return


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


multi_turns.update(ask_again=AskAgain, by_group=ByGroup)
envs["examiner"] = Examiner
