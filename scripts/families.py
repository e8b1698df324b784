"""Makes the tables of docs/families.md: what was seen of each family of models.

    python scripts/families.py --run qwen3_vl    # trains it (minutes); no name: all families
    python scripts/families.py --write           # the tables, from what was found

A run is `tests/stack/test_families.py`, which notes what it found in `scripts/bench/results`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compat.table import write_pages

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
PAGES = {"en": ROOT / "docs/families.md", "zh": ROOT / "docs/families_CN.md"}
RESULTS = ROOT / "scripts/bench/results/families.json"
TESTS = "tests/stack/test_families.py"

MADE = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3", "qwen3_moe", "internvl"),
    *("llava_onevision", "gemma3", "glm4v", "glm4v_moe", "qwen2_5_omni"),
)
"""Those that `scripts/tiny_vlm/families.py` makes."""

TAKES = {
    "videos": tuple(name for name in MADE if name not in ("qwen3", "qwen3_moe", "gemma3")),
    "audio": ("qwen2_5_omni",),
}
"""Which of them are made for these media."""

UPSTREAM = {
    ("llava_onevision", "videos"): ("ms-swift: images only", "ms-swift：仅图像"),
    ("glm4v", "videos"): ("ms-swift: images only", "ms-swift：仅图像"),
    ("glm4v_moe", "videos"): ("ms-swift: images only", "ms-swift：仅图像"),
}
"""What of this a family is not given, by family and kind of media, and whose fault it is."""

REMOTE_CODE = (
    "not made: its code comes with its checkpoints, in no package",
    "未制作：其代码随权重发布，不在任何软件包中",
)
NOT_MADE = ("not made; transformers has its code", "未制作；transformers 中有其代码")
GEMMA4 = (
    "made, and ms-swift fails at its first image: `'tuple' object has no attribute 'to'` "
    "(`swift/model/models/gemma.py`, `_patch_gemma4_forward`), with transformers 5.19",
    "已制作，ms-swift 在第一张图像处失败：`'tuple' object has no attribute 'to'`"
    "（`swift/model/models/gemma.py`，`_patch_gemma4_forward`），使用 transformers 5.19",
)
OTHERS = {
    "`minicpmv` to `minicpmv4_5`, `minicpmo`": REMOTE_CODE,
    "`ovis1_6` to `ovis2_5`": REMOTE_CODE,
    "`kimi_vl`": REMOTE_CODE,
    "`molmo`, `molmo2`": REMOTE_CODE,
    "`phi3_vision`": REMOTE_CODE,
    "`internvl_chat`": REMOTE_CODE,
    "`qwen3_omni_moe`": NOT_MADE,
    "`gemma3n`": NOT_MADE,
    "`gemma4`": GEMMA4,
    "`qwen3_5`, `qwen3_5_moe`": NOT_MADE,
    "`minicpmv4_6`, `minicpmv4_7`": NOT_MADE,
    "`llava1_5_hf`, `llava1_6_*_hf`, `idefics3`, `pixtral`, `mistral3`": NOT_MADE,
}
"""ms-swift's names of model types, and why there is no run."""

WORDS: dict[str, dict[str, str]] = {
    "en": {
        "head": "| model type | | prompts | all weights | LoRA, two ranks | server | videos "
        "| audio | placeholders | logits | stops | media |",
        "works": "works",
        "part": "in part",
        "not run": "not run",
        "equal": "equal",
        "line breaks": "equal: the rollout's line breaks",
        "wanted": "never, wanted at {:.0%}",
        "stops": "{} of {}",
        "media": "{} asked, {} made",
        "others": "| model type | no run |",
    },
    "zh": {
        "head": "| 模型类型 | | 提示 | 全参数 | LoRA，两个 rank | server | 视频 | 音频 | 占位符 "
        "| logits | 停止 | 媒体 |",
        "works": "可用",
        "part": "部分",
        "not run": "未运行",
        "equal": "一致",
        "line breaks": "一致：采用 rollout 的换行",
        "wanted": "从不采样，{:.0%} 的位置最想要",
        "stops": "{} / {}",
        "media": "请求 {}，处理 {}",
        "others": "| 模型类型 | 未运行的原因 |",
    },
}


def made(language: str) -> str:
    """The Markdown between the marks of a page, in `en` or `zh`."""
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    words, number = WORDS[language], list(WORDS).index(language)
    rows = [_row(name, found.get(name, {}), words, number) for name in MADE]
    others = [f"| {name} | {reasons[number]} |" for name, reasons in OTHERS.items()]
    table = [words["head"], "|---" * NUM_COLUMNS + "|", *rows]
    return "\n".join([*table, "", words["others"], "|---|---|", *others])


def _row(name: str, found: Mapping[str, Any], words: Mapping[str, str], number: int) -> str:
    whole, not_run = found.get("whole"), words["not run"]
    verdict = "works" if {"whole", "lora"} <= found.keys() else "part" if found else "not run"
    cells = [f"`{name}`", words[verdict]]
    if whole:
        sees = bool(whole["media_asked"])
        cells += [
            words["line breaks" if whole["line_breaks"] else "equal"],
            f"{whole['gap']:.0e}",
            *(_run(name, other, found, words, number) for other in OTHER_RUNS),
            words["wanted"].format(whole["wanted"]) if sees else "",
            f"`{whole['ways'][0]}`",
            words["stops"].format(whole["stopped"], whole["samples"]),
            words["media"].format(whole["media_asked"], whole["media_made"]) if sees else "",
        ]
    cells += [not_run] * (NUM_COLUMNS - len(cells))
    return f"| {' | '.join(cells)} |"


def _run(
    family: str, name: str, found: Mapping[str, Any], words: Mapping[str, str], number: int
) -> str:
    """The gap, behind "equal" where the first round has the tokens of another run."""
    if (family, name) in UPSTREAM:
        return UPSTREAM[family, name][number]
    if name not in found:
        return words["not run"] if family in TAKES.get(name, MADE) else ""
    gap = f"{found[name]['gap']:.0e}"
    return gap if name in TAKES else f"{words['equal']}, {gap}"


NUM_COLUMNS = 12
OTHER_RUNS = ("lora", "served", "videos", "audio")
"""Of `test_families.py`, beside that of all weights."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", nargs="*", metavar="NAME", help="train these families, or all")
    parser.add_argument("--write", action="store_true", help="into docs/families.md and _CN.md")
    arguments = parser.parse_args()
    status = 0
    if arguments.run is not None:
        unknown = set(arguments.run) - set(MADE)
        if unknown:
            parser.error(f"--run {' '.join(unknown)} is not known; expected of {', '.join(MADE)}")
        # A parameter's name stands between brackets; another's may begin with it.
        chosen = ["-k", " or ".join(f"{name}]" for name in arguments.run)] if arguments.run else []
        command = [sys.executable, "-m", "pytest", "-q", TESTS, *chosen]
        env = {**os.environ, "FAMILY_RESULTS": str(RESULTS)}
        status = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    if arguments.write:
        write_pages(PAGES, made, BEGIN, END)
    if not arguments.write and arguments.run is None:
        print(made("en"))
    return status


if __name__ == "__main__":
    sys.exit(main())
