"""A plugin for tests: conversations of two turns on a server, with planned events.

The environment variable `TURNS` names a folder. There a test writes `plan.json`, a list of events,
each with the name of a sample, a turn and a `kind`. An event happens once over all servers of the
folder, and writes its time to a file named by its kind. An event with `after` first waits until
some sample of the round has reached that turn.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns

from swift_grpo_ext.rollout import wire

TURNS = 2
FOLDER = Path(os.environ["TURNS"])


class Eventful(MultiTurnScheduler):
    """Asks a second time, whatever the first answer is, and lets the events of each turn happen."""

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        is_last = current_turn >= TURNS
        if is_last:
            self._meet(infer_request, current_turn)
        return is_last

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        self._meet(infer_request, current_turn)
        infer_request.messages.append({"role": "user", "content": "Say it again."})
        return {"infer_request": infer_request}

    def _meet(self, request: Any, turn: int) -> None:
        cores = self._cores()
        (FOLDER / "cores").write_text(" ".join(map(str, cores)))
        metadata = wire.read_metadata(request.data_dict)
        assert metadata is not None
        name = replace(metadata.sample_id, turn=0).request_id
        with (FOLDER / "met.jsonl").open("a") as f:
            f.write(json.dumps([time.time(), name, turn]) + "\n")
        for event in json.loads((FOLDER / "plan.json").read_text()):
            if (event["sample"], event["turn"]) == (name, turn):
                try:
                    with (FOLDER / event["kind"]).open("x") as f:
                        f.write(str(time.time()))
                except FileExistsError:
                    continue
                if "after" in event:
                    self._wait_for(name.rpartition("-")[0].rpartition("-")[0], event["after"])
                self._happen(event)

    def _wait_for(self, round_name: str, turn: int) -> None:
        while True:
            met = [json.loads(line) for line in (FOLDER / "met.jsonl").read_text().splitlines()]
            if any(name.startswith(f"{round_name}-") and at == turn for _, name, at in met):
                return
            time.sleep(0.02)

    def _cores(self) -> list[int]:
        """The processes of the engine."""
        manager = self.infer_engine.engine.engine_core.resources.engine_manager
        return [core.pid for core in manager.processes]

    def _happen(self, event: dict[str, Any]) -> None:
        if event["kind"] == "engine":
            os.kill(self._cores()[0], signal.SIGKILL)
        elif event["kind"] == "server":
            server = multiprocessing.parent_process()  # as tests start it, not the system's parent
            assert server is not None
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
        elif event["kind"] == "raises":
            raise LookupError("no such page")
        time.sleep(event.get("seconds", 0))


multi_turns["eventful"] = Eventful
