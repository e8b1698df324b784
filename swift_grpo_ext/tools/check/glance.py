"""Names of flags, and files, judged in a fraction of a second: ms-swift, which takes ten to import,
judges values after that (`settings.py`, `rules.py`)."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from swift_grpo_ext.checks.finding import Findings, did_you_mean, error
from swift_grpo_ext.flags import flag_names

Side = Literal["training", "rollout"]
COMMANDS: Mapping[Side, str] = {"training": "swift rlhf", "rollout": "swift rollout"}
ARGUMENTS: Mapping[Side, str] = {"training": "RLHFArguments", "rollout": "RolloutArguments"}
"""The class of a side's flags: they are its fields, and those of the classes that it extends."""

SOURCES = (
    ("swift", "arguments/**/*.py"),
    ("swift", "*/arg*.py"),
    ("transformers", "training_args*.py"),
)
"""The packages and files that hold those classes."""

LOCAL = ("/", ".", "~")
"""Beginnings of what is a path, and no id of a hub."""

DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".txt")


@cache
def upstream_flags(side: Side) -> frozenset[str]:
    """Return the names of ms-swift's own flags, read from its source; none where a class is not
    found there."""
    bases: defaultdict[str, list[str]] = defaultdict(list)
    fields: defaultdict[str, list[str]] = defaultdict(list)
    for package, pattern in SOURCES:
        spec = find_spec(package)
        folders = spec.submodule_search_locations if spec else None
        for path in Path(folders[0]).glob(pattern) if folders else ():
            nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
            imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
            names = {alias.asname: alias.name for node in imports for alias in node.names}
            for node in nodes:
                # Two classes of one name are taken for one: ms-swift's extends transformers'.
                if isinstance(node, ast.ClassDef):
                    given = [ast.unparse(base) for base in node.bases]
                    bases[node.name] += [names.get(base, base) for base in given]
                    entries = [entry for entry in node.body if isinstance(entry, ast.AnnAssign)]
                    fields[node.name] += [ast.unparse(entry.target) for entry in entries]
    found, waiting = set[str](), [ARGUMENTS[side]]
    while waiting:
        name = waiting.pop()
        if name not in bases:
            return frozenset()
        if name not in found:
            found.add(name)
            waiting += bases[name]
    return frozenset(field for name in found for field in fields[name])


def check_names(side: Side, names: Iterable[str]) -> None:
    """Raise `ValueError` for names that `swift` does not know."""
    problems = []
    upstream = upstream_flags(side)
    known = {*upstream, *flag_names()} if upstream else {*names}
    for name in dict.fromkeys(names):
        # ms-swift takes the beginning of a flag for the flag.
        near = sorted((flag for flag in upstream if flag.startswith(name)), key=len)
        if not (name in known or name.removeprefix("no_") in known or len(near) == 1):
            hint = f"did you mean {' or '.join(near)}?" if near else did_you_mean(name, known)
            problems.append(f"{name} ({hint or 'leave it out'})")
    if problems:
        raise ValueError(f"no setting of {COMMANDS[side]}: {', '.join(problems)}.")


def by_flag(argv: Iterable[str]) -> dict[str, list[str]]:
    """Return the values of each flag, by its name as ms-swift spells it; the last wins."""
    values: dict[str, list[str]] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = [value] if equals else []
        elif name:
            values[name].append(word)
    return values


def check_files(given: Mapping[str, Sequence[str]]) -> Findings:
    """Refuse plugins, data sets and models that name a file or a folder that does not exist."""
    for plugin in plugins_of(given):
        if not Path(plugin).expanduser().is_file():
            yield error(f"external_plugins {plugin}", absent(plugin, "file"))
    for name in ("dataset", "val_dataset"):
        for dataset in given.get(name, ()):
            path = file_of(dataset)
            if (path.suffix in DATA_SUFFIXES or dataset.startswith(LOCAL)) and not path.exists():
                text = absent(dataset, "file or folder")
                yield error(f"{name} {dataset}", text, "Name a file of rows, or a hub id.")
    for model in given.get("model", ()):
        if model.startswith(LOCAL) and not Path(model).expanduser().is_dir():
            yield error(
                f"model {model}",
                absent(model, "directory"),
                "Give the directory of config.json and the weights, or a hub id such as Org/model.",
            )


def plugins_of(settings: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the files that a side imports; ms-swift joins an older flag's (base_args.py)."""
    for name in ("external_plugins", "custom_register_path"):
        yield from dict.fromkeys(settings.get(name) or ())


def file_of(dataset: str) -> Path:
    """Return the file that a data set's name stands for; `#500` behind it takes 500 rows."""
    name = dataset if Path(dataset).exists() else re.sub(r"#\d+$", "", dataset)
    return Path(name).expanduser()


def absent(path: str, kind: str) -> str:
    """Say that there is no such file, and where it was looked for where the path does not."""
    where = "" if Path(path).expanduser().is_absolute() else f" in {Path.cwd()}"
    return f"there is no such {kind}{where}."
