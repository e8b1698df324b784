"""Check a run's settings as they are written: are names and files there, and do both sides agree?

It takes a fraction of a second, since it imports no ms-swift. The start itself checks the rest.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePath

from swift_grpo_ext.checks.finding import Findings, did_you_mean, error
from swift_grpo_ext.flags import flag_names
from swift_grpo_ext.tools.sources import COMMANDS, Side, Source

# These files of two packages define ms-swift's flags.
SOURCES = (
    ("swift", "arguments/**/*.py"),
    ("swift", "*/arg*.py"),
    ("transformers", "training_args*.py"),
)
# If the files lack one of these flags, classes have moved, and other flags may be missing, too.
FIELDS = {"rlhf_type", "vllm_pipeline_parallel_size", "template", "adam_epsilon"}

LOCAL = ("/", ".", "~")  # prefixes of paths; other names are ids of a hub
DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".txt")
MAX_BYTES = 2**26  # of a file of JSON lines that are parsed: half a second

PLUGIN = "grpo_ext.py"
TYPES = ("grpo", "gkd")

SAME_ON_BOTH_SIDES = (
    *("model", "model_type", "template", "torch_dtype"),
    *("new_special_tokens", "agent_template", "response_prefix"),
)
# These settings have to be the same if the named side has them.
SAME_WHERE_GIVEN: Mapping[str, Side] = {
    "system": "rollout",  # else each request has the training's
    # Else the server's value applies (ms-swift 4.6, rlhf_trainers/rollout_mixin.py:421).
    "multi_turn_scheduler": "training",
    "max_turns": "training",
}
# These variables set the sizes of images, and so the ids of prompts.
SAME_IN_ENV = ("MAX_PIXELS", "MIN_PIXELS", "IMAGE_MAX_TOKEN_NUM", "VIDEO_MAX_PIXELS", "FPS")

LORA_RANK, MAX_LORA_RANK, PORT = "8", "16", "8000"  # defaults of ms-swift 4.6


def check_sources(sources: Mapping[Side, Source], *, looks_at_files: bool) -> Findings:
    """Check a run's settings as they are written."""
    for side, source in sources.items():
        yield from check_names(side, source.given)
        if PLUGIN not in (PurePath(plugin).name for plugin in plugins_of(source.given)):
            yield error(
                "external_plugins",
                f"`{COMMANDS[side]}` does not load {PLUGIN}: `swift-grpo-ext plugin-path` prints "
                "the installed file.",
            )
    if looks_at_files:
        found = [finding for source in sources.values() for finding in check_files(source.given)]
        yield from dict.fromkeys(found)
    training, rollout = sources.get("training"), sources.get("rollout")
    if training is not None:
        algorithm = training.given.get("rlhf_type", ["dpo"])[-1]
        if algorithm not in TYPES:
            yield error("rlhf_type", f"is {algorithm}; expected {' or '.join(TYPES)}.")
    if training is not None and rollout is not None:
        yield from check_places(training, rollout)
        yield from check_agreement(training, rollout)


# --- names ---


@cache
def upstream_flags() -> frozenset[str]:
    """Return the names of all flags of ms-swift, read from its source; none if one of `FIELDS` is
    missing."""
    names = set[str]()
    for package, pattern in SOURCES:
        spec = find_spec(package)
        folders = spec.submodule_search_locations if spec else None
        for path in Path(folders[0]).glob(pattern) if folders else ():
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    entries = [entry for entry in node.body if isinstance(entry, ast.AnnAssign)]
                    names |= {ast.unparse(entry.target) for entry in entries}
    return frozenset(names) if names >= FIELDS else frozenset()


def check_names(side: Side, names: Iterable[str]) -> Findings:
    """Refuse names that `swift` does not know."""
    known = upstream_flags()
    for name in names if known else ():
        # ms-swift takes abbreviations of its flags, and refuses ambiguous ones.
        is_beginning = any(flag.startswith(name) for flag in known)
        if not is_beginning and name.removeprefix("no_") not in {*known, *flag_names()}:
            hint = did_you_mean(name, {*known, *flag_names()}) or "leave it out."
            yield error(name, f"is no setting of {COMMANDS[side]};", hint)


# --- files ---


def check_files(given: Mapping[str, Sequence[str]]) -> Findings:
    """Refuse plugins, data sets and models that name a file or a folder that does not exist, and
    files of rows that cannot be read."""
    for plugin in plugins_of(given):
        if not Path(plugin).expanduser().is_file():
            yield error(f"external_plugins {plugin}", absent(plugin, "file"))
    for name in ("dataset", "val_dataset"):
        for dataset in given.get(name, ()):
            # `#500` behind a name takes 500 rows.
            name_alone = dataset if Path(dataset).exists() else re.sub(r"#\d+$", "", dataset)
            path = Path(name_alone).expanduser()
            if (path.suffix in DATA_SUFFIXES or dataset.startswith(LOCAL)) and not path.exists():
                text = absent(dataset, "file or folder")
                yield error(f"{name} {dataset}", text, "Name a file of rows, or a hub id.")
            elif path.suffix == ".jsonl" and (problem := broken_line(path)):
                text = f"cannot be read: {problem}."
                yield error(f"{name} {dataset}", text, "Correct the line, or leave it out.")
    for model in given.get("model", ()):
        if model.startswith(LOCAL) and not Path(model).expanduser().is_dir():
            yield error(
                f"model {model}",
                absent(model, "directory"),
                "Give the directory of config.json and the weights, or a hub id such as Org/model.",
            )


def broken_line(path: Path) -> str:
    """Return the first line of a file of JSON lines that is no JSON; "" if there is none."""
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            size += len(line)
            if size > MAX_BYTES:
                break
            try:
                if line.strip():
                    json.loads(line)
            except ValueError as e:
                beginning = line[:60].decode(errors="replace").strip()
                return f"line {number} is no JSON ({str(e).partition(': line 1 ')[0]}): {beginning}"
    return ""


def plugins_of(settings: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the files that a side imports."""
    # ms-swift adds those of an older flag (base_args.py).
    for name in ("external_plugins", "custom_register_path"):
        yield from dict.fromkeys(settings.get(name) or ())


def absent(path: str, kind: str) -> str:
    where = "" if Path(path).expanduser().is_absolute() else f" in {Path.cwd()}"
    return f"there is no such {kind}{where}."


# --- both sides ---


def check_places(training: Source, rollout: Source) -> Findings:
    """Refuse a server's port that the training does not use, and a GPU that both sides name."""
    ports = training.given.get("vllm_server_port", [PORT])
    port = _text(rollout.given.get("port", [PORT]))
    if "vllm_server_host" in training.given and port not in ports:
        yield error(
            "port",
            f"{port} of `swift rollout` is not among vllm_server_port ({', '.join(ports)}) of "
            "`swift rlhf`.",
        )
    shared = sorted({*devices_of(training)} & {*devices_of(rollout)})
    if shared and "NNODES" not in training.env:
        text = f"GPU {', '.join(shared)} is named by both sides: share the GPUs out."
        yield error("CUDA_VISIBLE_DEVICES", text)


def devices_of(source: Source) -> list[str]:
    """Return the GPUs that a side's ENV names."""
    return [part for part in source.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]


def check_agreement(training: Source, rollout: Source) -> Findings:
    """Refuse two sides with different models, prompts or pixels."""
    pairs: dict[str, tuple[str | None, str | None]] = {}
    for name in (*SAME_ON_BOTH_SIDES, *SAME_WHERE_GIVEN):
        given = {source.side: _text(source.given.get(name)) for source in (training, rollout)}
        if name in SAME_ON_BOTH_SIDES or given[SAME_WHERE_GIVEN[name]] is not None:
            pairs[name] = given["training"], given["rollout"]
    for name in SAME_IN_ENV:
        pairs[f"ENV {name}"] = training.env.get(name), rollout.env.get(name)
    for name, values in pairs.items():
        if values[0] != values[1]:
            shown = ["not set" if value is None else repr(value) for value in values]
            yield error(
                name,
                f"is {shown[0]} of `swift rlhf` and {shown[1]} of `swift rollout`: both sides need "
                "the same.",
            )
    rank = training.given.get("lora_rank", [LORA_RANK])[-1]
    max_rank = rollout.given.get("vllm_max_lora_rank", [MAX_LORA_RANK])[-1]
    takes_adapters = _text(rollout.given.get("vllm_enable_lora")) == "true"
    if takes_adapters and f"{rank}{max_rank}".isdecimal() and int(rank) > int(max_rank):
        text = f"{max_rank} is less than the training's lora_rank {rank}."
        yield error("vllm_max_lora_rank", text)


def _text(values: Sequence[str] | None) -> str | None:
    """Return the values of a flag as one text; None if it is off or not given."""
    text = " ".join(values or ())
    return {"true": "true", "false": None}.get(text.lower(), text or None)
