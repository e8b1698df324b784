"""What the pages name is there: links, flags, commands, files, messages; and their code runs.

`test_translations` holds both languages against each other.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import doctest
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from swift_grpo_ext.flags import flag_names
from swift_grpo_ext.sampling.seeding import sample_seed
from swift_grpo_ext.tools import cli
from tests.documents import Page, is_relative, originals
from tests.newest import is_newest
from tests.record.rows import ROW, sample_id, write_session

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("docs", "examples", "plugins", "scripts", "swift_grpo_ext", "tests")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for section in Page(page).sections:
        for link in filter(is_relative, section.links + section.images):
            path, anchor = Page(page).target(link)
            has_anchor = not anchor or Page(path).number_of(anchor) is not None
            if not path.exists() or not path.is_relative_to(ROOT) or not has_anchor:
                broken.append(f"{section.title!r}: {link}")
    assert broken == []


FLAG = re.compile(r"(?<![\w-])--([a-zA-Z][\w-]*)")
FOREIGN_FLAGS = {"shm-size", "ipc", "no-deps", "ntasks-per-node", "extra-index-url", "markdown",
                 "hypothesis-profile"}  # fmt: skip
"""Of docker, pip, Slurm and pytest."""


def code_of(page: Path) -> Iterator[tuple[str, str]]:
    for section in Page(page).sections:
        for text in section.code:
            yield section.title, text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
@pytest.mark.skipif(not is_newest("swift"), reason="pages speak of the newest ms-swift")
def test_flags_exist(page: Path) -> None:
    unknown = {
        f"{title!r}: --{name}"
        for title, text in code_of(page)
        for name in FLAG.findall(text)
        if name not in known_flags()
    }
    assert unknown == set()


@cache
def known_flags() -> frozenset[str]:
    """Ours, ms-swift's, and the options of our commands and scripts."""
    from swift.arguments import RLHFArguments, RolloutArguments

    classes = (RLHFArguments, RolloutArguments)
    upstream = {field.name for args in classes for field in dataclasses.fields(args)}
    parsers = subcommands().values()
    commands = {o[2:] for p in parsers for o in p._option_string_actions if o.startswith("--")}
    scripts = {
        name
        for folder in ("scripts", "examples")
        for script in (ROOT / folder).rglob("*")
        if script.suffix in (".py", ".sh")
        for name in FLAG.findall(script.read_text(encoding="utf-8"))
    }
    return frozenset({*flag_names(), *upstream, *commands, *scripts, *FOREIGN_FLAGS})


@cache
def subcommands() -> dict[str, argparse.ArgumentParser]:
    commands = argparse.ArgumentParser().add_subparsers()
    for add in cli.COMMANDS:
        add(commands)
    return dict(commands.choices)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    named = {
        command
        for _, text in code_of(page)
        for command in re.findall(r"swift-grpo-ext ([a-z][a-z-]*)", text)
    }
    assert named <= subcommands().keys()


OURS = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)}|\.ci)/[\w./*-]*")
LOOKS_LIKE_FILE = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*\.(?:html|jsonl?|md|png|py|sh|toml|txt|ya?ml)")
UPSTREAM = ("peft", "swift", "transformers", "trl", "vllm")
WRITTEN = {
    *("adapter_config.json", "args.json", "completions.jsonl", "config.json", "diversity.jsonl"),
    *("evaluation.json", "logging.jsonl", "page.html", "report.html", "report.png"),
    *("selftest.html", "selftest.json", "tokenizer.json", "trainer_state.json"),
    *("train.jsonl", "samples.jsonl", "samples.parquet", "launch.sh", "exact.py"),
}
"""By a run, or by its user."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_exist(page: Path) -> None:
    missing = []
    for section in Page(page).sections:
        named = {path.rstrip(".") for text in section.code for path in OURS.findall(text)}
        missing += [f"{section.title!r}: {path}" for path in named if not _is_there(ROOT, path)]
        files = {s for s in section.spans if LOOKS_LIKE_FILE.fullmatch(s) and s not in named}
        missing += [f"{section.title!r}: {f}" for f in files if not _is_known(f, page.parent)]
    assert sorted(missing) == []


def _is_there(folder: Path, path: str) -> bool:
    """Also the beginning of a name, as launch.sh takes it, and with wildcards."""
    return any(folder.glob(path.rstrip("/"))) or any(folder.glob(path.rstrip("*") + "*"))


def _is_known(file: str, folder: Path) -> bool:
    if file in WRITTEN or file.startswith(("output/", "run/")):
        return True
    package, _, path = file.partition("/")
    if package in UPSTREAM and path:
        if not is_newest(package):
            return True
        spec = importlib.util.find_spec(package)  # loads nothing
        roots = (spec.submodule_search_locations or []) if spec else []
        return spec is None or any((Path(root) / path).exists() for root in roots)
    if folder != ROOT and any(folder.rglob(file)):
        return True
    return any(_is_there(root, file) for root in (ROOT, ROOT / "swift_grpo_ext", folder))


# --- messages on the pages are those of the code ---


def test_messages_of_the_troubleshooting_page_are_ours() -> None:
    """First columns of its tables; `...` stands for what a message is given."""
    messages = list(our_messages())
    unknown = [
        named
        for section in Page(ROOT / "docs/troubleshooting.md").sections
        for table in section.tables
        for row in table[1:]
        for named in row[0].spans
        if not any(map(_pattern(named).search, messages))
    ]
    assert unknown == []


def _pattern(message: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, message.split("..."))), re.DOTALL)


def our_messages() -> Iterator[str]:
    """Every text in the package, f-strings with `{}` for what they are given."""
    for module in (ROOT / "swift_grpo_ext").rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


# --- the code on the pages runs ---


@pytest.mark.parametrize("page", originals(ROOT), ids=name_of)
def test_code_on_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page, in order, where a run has left a sample log in `output/my-run`."""
    rows = [
        dataclasses.replace(ROW, sample_id=p, seed=sample_seed(42, p), weight_version=p.step)
        for p in (
            sample_id(s, group=g, index=i) for s in range(4) for g in range(6) for i in range(3)
        )
    ]
    write_session(tmp_path / "output/my-run", rows)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for section in Page(page).sections:
        for language, text in section.blocks:
            where = f"{name_of(page)}, {section.title!r}"
            if language == "python":
                exec(compile(ast.parse(text), where, "exec"), names)
            elif language == "pycon":
                test = doctest.DocTestParser().get_doctest(text, names, where, str(page), 0)
                runner.run(test, clear_globs=False)
                names = test.globs
    assert runner.failures == 0
