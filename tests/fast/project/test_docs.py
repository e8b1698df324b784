"""Links, flags, commands, files and messages on the pages exist, and code on them runs. Both
languages have the same sections, code, tables, numbers and links.

Each promise of docs/promises.md is named by a test that proves it. Each run of the suite proves
that it passes on the run's machine (I3); `scripts/bench/record.py` measures the costs (V4)."""

import ast
import dataclasses
import doctest
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import memory
import pytest
from markdown_it import MarkdownIt
from pages import read_from

from swift_grpo_ext.flags import flag_names
from swift_grpo_ext.sampling.seeding import sample_seed
from swift_grpo_ext.tools import cli
from swift_grpo_ext.tools.sources import read_sources
from tests.rig.record.rows import ROW, sample_id, write_session
from tests.rig.releases import IS_NEWEST_SWIFT

# --- pages, section by section ---

NUMBER = re.compile(r"[0-9]+(?:[.,:][0-9]+)*")
TRANSLATED = "_CN"  # ends the name of a page's Chinese translation


@dataclass
class Section:
    """A heading, and what follows it up to the next one of any level."""

    title: str
    heading: str  # `h1` to `h6`; "" for what stands before the first heading
    blocks: list[tuple[str, str]] = field(default_factory=list)  # language and text of code
    rows: list[list[list[str]]] = field(default_factory=list)  # of tables: each cell's code spans
    spans: list[str] = field(default_factory=list)
    numbers: set[str] = field(default_factory=set)  # in running text, without code
    links: list[str] = field(default_factory=list)  # targets of links and pictures

    @property
    def anchor(self) -> str:
        """The anchor that GitHub makes."""
        return re.sub(r"[^\w\- ]", "", self.title.strip().lower()).replace(" ", "-")

    @property
    def code(self) -> list[str]:
        """Everything that is set as code."""
        return [*self.spans, *(text for _, text in self.blocks)]


@cache
def sections_of(page: Path) -> list[Section]:
    sections = [Section("(top)", "")]
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    for before, token in zip([None, *tokens], tokens, strict=False):
        section = sections[-1]
        if token.type in ("fence", "code_block"):
            section.blocks.append((token.info.strip(), token.content))
        elif token.type == "tr_open":
            section.rows.append([])
        elif token.type == "inline":
            children = token.children or []
            if before and before.type == "heading_open":
                section = Section("".join(t.content for t in children), before.tag)
                sections.append(section)
            spans = [t.content for t in children if t.type == "code_inline"]
            section.spans += spans
            section.links += [str(t.attrs["href"]) for t in children if t.type == "link_open"]
            section.links += [str(t.attrs["src"]) for t in children if t.type == "image"]
            texts = " ".join(t.content for t in children if t.type == "text")
            section.numbers.update(NUMBER.findall(texts))
            if before and before.type in ("th_open", "td_open"):
                section.rows[-1].append(spans)
    return sections


def leads_somewhere(page: Path, link: str) -> bool:
    """Return whether a relative link's file is ours and has the section that the link names."""
    path, _, anchor = unquote(link).partition("#")
    target = (page.parent / path).resolve() if path else page
    is_ours = target.exists() and target.is_relative_to(ROOT)
    return is_ours and (not anchor or anchor in [s.anchor for s in sections_of(target)])


def is_relative(link: str) -> bool:
    return re.match(r"[a-z]+:", link) is None


# --- what pages say ---

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("docs", "examples", "plugins", "scripts", "swift_grpo_ext", "tests")
QUICKSTART = ROOT / "docs/quickstart.md"
PAGES = sorted([*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))])
TRANSLATIONS = [page for page in PAGES if page.stem.endswith(TRANSLATED)]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


FLAG = re.compile(r"(?<![\w-])--([a-zA-Z][\w-]*)")
FOREIGN_FLAGS = {
    *("shm-size", "ipc", "no-deps", "ntasks-per-node", "markdown", "hypothesis-profile"),
    *("durations", "logdir"),
}
"""Flags of docker, pip, Slurm, pytest and TensorBoard."""


@cache
def known_commands() -> tuple[set[str], set[str]]:
    """Return our commands; and all flags: ours, ms-swift's, those of our commands and scripts."""
    from swift.arguments import RLHFArguments, RolloutArguments

    tools = (ROOT / "swift_grpo_ext/tools/cli.py").read_text(encoding="utf-8")
    commands = set(re.findall(r'command\(\s*"([a-z-]+)"', tools))
    assert len(commands) > 5
    fields = [*dataclasses.fields(RLHFArguments), *dataclasses.fields(RolloutArguments)]
    flags = {*flag_names(), *(field.name for field in fields), *re.findall(r'"--([\w-]+)"', tools)}
    for folder in ("scripts", "examples"):
        for script in (ROOT / folder).rglob("*"):
            if script.suffix in (".py", ".sh"):
                flags |= set(FLAG.findall(script.read_text(encoding="utf-8")))
    return commands, flags | FOREIGN_FLAGS


OURS = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)}|\.ci)/[\w./*-]*")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
@pytest.mark.skipif(not IS_NEWEST_SWIFT, reason="pages speak of the newest ms-swift")
def test_what_a_page_names_exists(page: Path) -> None:
    """Links, flags, our commands, paths that begin with a folder of ours, and modules by their
    room."""
    commands, flags = known_commands()
    rooms = {path.name for path in (ROOT / "swift_grpo_ext").iterdir() if path.is_dir()}
    missing = []
    for section in sections_of(page):
        links = filter(is_relative, section.links)
        missing += [link for link in links if not leads_somewhere(page, link)]
        named = set[str]()
        for text in section.code:
            missing += set(FLAG.findall(text)) - flags
            missing += set(re.findall(r"swift-grpo-ext ([a-z][a-z-]*)", text)) - commands
            named |= {path.rstrip(".") for path in OURS.findall(text)}
        for span in section.spans:
            if re.fullmatch(r"\w+/[\w/]+\.py", span) and span.partition("/")[0] in rooms:
                named.add(f"swift_grpo_ext/{span}")
        # launch.sh takes the beginning of a preset's name.
        missing += [path for path in named if not any(ROOT.glob(path.rstrip("*/") + "*"))]
    assert missing == []


def test_messages_of_the_troubleshooting_page_are_ours() -> None:
    """First columns of its tables; `...` stands for what a message is given."""
    code = [p.read_text(encoding="utf-8") for p in (ROOT / "swift_grpo_ext").rglob("*.py")]
    nodes = [node for text in code for node in ast.walk(ast.parse(text))]
    texts = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
            texts.append("".join(map(str, parts)))
    for section in sections_of(ROOT / "docs/troubleshooting.md"):
        for message in (span for row in section.rows for span in row[0]):
            pattern = re.escape(message).replace(r"\.\.\.", ".*")
            assert any(re.search(pattern, text, re.S) for text in texts), message


@pytest.mark.parametrize("page", [p for p in PAGES if p not in TRANSLATIONS], ids=name_of)
def test_code_on_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page, in order, where a run has left its record in `output/my-run`."""
    places = (sample_id(s, group=g, index=i) for s in range(4) for g in range(6) for i in range(3))
    rows = [
        dataclasses.replace(ROW, sample_id=p, seed=sample_seed(42, p), weight_version=p.step)
        for p in places
    ]
    write_session(tmp_path / "output/my-run", rows)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for section in sections_of(page):
        for language, text in section.blocks:
            where = f"{name_of(page)}, {section.title!r}"
            if language == "python":
                exec(compile(text, where, "exec"), names)
            elif language == "pycon":
                test = doctest.DocTestParser().get_doctest(text, names, where, str(page), 0)
                runner.run(test, clear_globs=False)
                names = test.globs
    assert runner.failures == 0


@pytest.mark.skipif(not IS_NEWEST_SWIFT, reason="pages speak of the newest ms-swift")
def test_each_training_of_the_page_holds_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trainings on 1 GPU, on 8, resumed, and with W&B: groups fill the batch, flags are known."""
    from swift_grpo_ext.command_line import Parser, RLHFExtArguments

    known = {action.dest for action in Parser([RLHFExtArguments])._actions}
    text = QUICKSTART.read_text(encoding="utf-8")  # its blocks may be within lists
    blocks = re.findall(r"^ *```(bash|yaml)\n(.*?)^ *```$", text, re.M | re.S)
    settings = next(textwrap.dedent(text) for language, text in blocks if language == "yaml")
    (tmp_path / "train.yaml").write_text(settings, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    rounds = []
    commands = "".join(textwrap.dedent(text) for language, text in blocks if language == "bash")
    commands = commands.replace("\\\n", " ")
    pattern = r"^(?:NPROC_PER_NODE=(\d+) )?swift rlhf train\.yaml(.*)$"
    for ranks, words in re.findall(pattern, commands, re.M):
        argv = shlex.split(words, comments=True)
        status = cli.main(["check", "train.yaml", "--settings-only", "--", *argv])
        assert status == 0, capsys.readouterr().out
        given = read_sources("train.yaml", overrides=argv)["training"].given
        assert given.keys() <= known
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
        size, steps, group = (int(given[name][0]) for name in names)
        rounds.append(divmod(int(ranks or 1) * size * steps, group))
    assert rounds == [(4, 0), (16, 0), (4, 0), (4, 0)]


def test_the_table_of_memory_is_up_to_date() -> None:
    """Else: `python scripts/memory.py --write`."""
    for page in (QUICKSTART, QUICKSTART.with_stem("quickstart_CN")):
        assert read_from(page, memory.TABLE) == memory.table()


def test_each_promise_has_a_test() -> None:
    """If not, name its id in the docstring of the test that proves it."""
    command = [sys.executable, str(ROOT / "scripts/dev/promises.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    missing = [line for line in done.stdout.splitlines() if line.endswith("| none |")]
    assert (done.returncode, missing) == (0, []), done.stderr


# --- Chinese pages ---

ONLY_IN_CHINESE = ("推理和训练分开2-块-gpu-推理6-块训练", "想让两次训练完全一致")
"""Anchors of sections that shorten an English page."""

COMMENT = re.compile(r"(?:^|\s)#\s.*$", re.M)


def parts_of(block: tuple[str, str]) -> tuple[str, list[str], set[str]]:
    """Return a block's language, its code without comments, and the comments' numbers."""
    language, text = block
    code = [line.rstrip() for line in COMMENT.sub("", text).splitlines()]
    return language, code, set(NUMBER.findall(" ".join(COMMENT.findall(text))))


def files_of(section: Section) -> set[str]:
    """Return the pages that a section links to, by their names in English."""
    return {link.partition("#")[0].replace(f"{TRANSLATED}.", ".") for link in section.links}


@pytest.mark.parametrize("translation", TRANSLATIONS, ids=name_of)
def test_the_translation_has_not_drifted(translation: Path) -> None:
    """Each section has the code, the tables, the numbers and the links of the English one. Only
    comments are translated. How often a sentence repeats a flag or a number is free."""
    original = translation.with_stem(translation.stem.removesuffix(TRANSLATED))
    ours, theirs = sections_of(original), sections_of(translation)
    theirs = [section for section in theirs if section.anchor not in ONLY_IN_CHINESE]
    assert [section.heading for section in ours] == [section.heading for section in theirs]
    for a, b in zip(ours, theirs, strict=True):
        where = f"{a.title!r} / {b.title!r}"
        assert list(map(parts_of, a.blocks)) == list(map(parts_of, b.blocks)), where
        of_a, of_b = ([[set(cell) for cell in row] for row in each.rows] for each in (a, b))
        assert of_a == of_b, where
        assert (set(a.spans), a.numbers) == (set(b.spans), b.numbers), where
        assert files_of(a) == files_of(b), where
    assert ours[1].links[0] == translation.name
