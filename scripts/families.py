"""Makes the tables of docs/support.md: what was seen of each family of models.

    python scripts/families.py --run qwen3_vl    # trains it (minutes); no name: all families
    python scripts/families.py --write           # the tables, from what was found

A run is `tests/stack/test_families.py`, and `test_router_replay.py` beside it; they note what they
found in `scripts/bench/results`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from pages import ROOT, SUPPORT, markdown, write_into
from tiny_vlm.families import FAMILIES, Family

TABLE, TABLE_OF_EXPERTS = "families", "experts"
RESULTS = ROOT / "scripts/bench/results/families.json"
TESTS = ("tests/stack/test_families.py", "tests/stack/test_router_replay.py")

REMOTE_CODE = "not made: its code comes with its checkpoints, in no package"
NOT_MADE = "not made; transformers has its code"
NOT_EXPANDED = "not made: ms-swift's template writes one token for all of an image's"
OTHER_MODEL = "not made: ms-swift's template is for the code that comes with its checkpoints"
OTHERS = {
    "`minicpmv` to `minicpmv4_5`, `minicpmo`": REMOTE_CODE,
    "`ovis1_6` to `ovis2_5`": REMOTE_CODE,
    "`kimi_vl`": REMOTE_CODE,
    "`molmo`, `molmo2`": REMOTE_CODE,
    "`phi3_vision`": REMOTE_CODE,
    "`internvl_chat`": REMOTE_CODE,
    "`gemma3n`, `llama4`": NOT_MADE,
    "`minicpmv4_7`": NOT_MADE,
    "`llava_llama3_hf`, `llava_next_video_hf`": NOT_EXPANDED,
    "`paddle_ocr`, `hunyuan_ocr`": OTHER_MODEL,
    "`qwen2_audio`": "made, and not loaded: transformers 5.19 saves its text as "
    "`language_model.model.model`; ms-swift's template, for transformers before 4.49, writes one "
    "token for all of a sound's",
    "`paddleocr_vl`": "not made: ms-swift's template takes what transformers 5.19 says of images, "
    "a tuple, for a tensor (`templates/baidu.py`, `PaddleOCR1_5Template._post_encode`)",
}
"""ms-swift's names of model types, and why there is no run."""

OTHER_RUNS = ("lora", "served", "videos", "audio")
"""The runs of `test_families.py`, beside that of all weights."""


def made() -> str:
    """Return the Markdown between the marks of the page."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = []
    for name, family in FAMILIES.items():
        runs: Mapping[str, Any] = results.get(name, {})
        if "whole" not in runs:
            rows.append([f"`{name}`", family.dtype, *["not run"] * 8])
            continue
        whole = runs["whole"]
        prompts = "equal: the rollout's line breaks" if whole["line_breaks"] else "equal"
        gaps = [_gap(family, other, runs) for other in OTHER_RUNS]
        stops = f"{whole['stopped']} of {whole['samples']}"
        shapes = ""
        if "shapes" in runs:
            shapes = f"not {', '.join(wrong)}" if (wrong := runs["shapes"]["wrong"]) else "equal"
        row = [f"`{name}`", family.dtype, prompts, f"{whole['gap']:.0e}", *gaps, stops, shapes]
        rows.append(row)
    names = ("all weights", "LoRA, 2 ranks", "server", "videos", "audio", "stops", "shapes")
    trained = markdown(("model type", "in", "prompts", *names), rows)
    return f"{trained}\n\n{markdown(('model type', 'no run'), OTHERS.items())}"


def made_of_experts() -> str:
    """Return the table of what replaying a rollout's experts changes."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = []
    for name, runs in results.items():
        for how, label in (("plain", "no"), ("replayed", "yes"), ("served", "yes, from a server")):
            if found := runs.get("replay", {}).get(how):
                share = f"{found['equal']:.1%}" if "equal" in found else ""
                gaps = (f"{found['mean']:.3f}", f"{found['max']:.2f}")
                rows.append((f"`{name}`", label, share, *gaps))
    head = ("model type", "replayed", "equal choices", "mean gap", "largest gap of a token")
    return markdown(head, rows)


def _gap(family: Family, run: str, runs: Mapping[str, Any]) -> str:
    """Return a run's gap, behind "equal" where its first round has the tokens of another run."""
    if run == "videos" and family.videos_fail:
        return "ms-swift: images only"
    if run not in runs:
        return "not run" if getattr(family, run, True) else ""
    gap = f"{runs[run]['gap']:.0e}"
    return gap if run in ("videos", "audio") else f"equal, {gap}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", nargs="*", choices=list(FAMILIES), help="train these, or all")
    parser.add_argument("--write", action="store_true", help="into docs/support.md")
    arguments = parser.parse_args()
    status = 0
    if arguments.run is not None:
        # A parameter's name stands between brackets, alone or before that of media; another's may
        # begin with it.
        chosen = [f"[{name}{end}" for name in arguments.run for end in "]-"]
        command = [sys.executable, "-m", "pytest", "-q", *TESTS, "-k", " or ".join(chosen)]
        env = {**os.environ, "FAMILY_RESULTS": str(RESULTS)}
        status = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    if arguments.write:
        write_into(SUPPORT, TABLE, made())
        write_into(SUPPORT, TABLE_OF_EXPERTS, made_of_experts())
    if not arguments.write and arguments.run is None:
        print(made())
    return status


if __name__ == "__main__":
    sys.exit(main())
