"""Count lines by room, functions, comments and types of the project.

    python scripts/dev/counts.py                     the working tree
    python scripts/dev/counts.py --against HEAD~20   also another commit

All lines of .py, .sh, .md, .html, .js and .css files count, but links do not. Code lines exclude
empty lines, comments and docstrings.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "swift_grpo_ext"
COUNTED = (".py", ".sh", ".md", ".html", ".js", ".css")
Figures = dict[str, str]  # column of the table: values by name


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", metavar="REV", help="another commit")
    options = parser.parse_args()
    listed = git("ls-files", "--cached", "--others", "--exclude-standard").decode().splitlines()
    paths = [path for name in listed if (path := ROOT / name).suffix in COUNTED]
    kept = [path for path in paths if path.is_file() and not path.is_symlink()]
    columns = {"now": figures({path.relative_to(ROOT): path.read_bytes() for path in kept})}
    if options.against:
        with tarfile.open(fileobj=io.BytesIO(git("archive", options.against))) as archive:
            members = ((Path(m.name), archive.extractfile(m)) for m in archive if m.isfile())
            files = {path: f.read() for path, f in members if f and path.suffix in COUNTED}
        columns = {options.against: figures(files), **columns}
    print(f"| | {' | '.join(columns)} |")
    print(f"|---{'|---' * len(columns)}|")
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        values = (column.get(name, "") for column in columns.values())
        print(f"| {name} | {' | '.join(values)} |")


def git(*argv: str) -> bytes:
    return subprocess.run(["git", *argv], cwd=ROOT, check=True, capture_output=True).stdout


def figures(files: Mapping[Path, bytes]) -> Figures:
    """Return the figures of a tree of files."""
    lines: Counter[str] = Counter()
    modules: list[str] = []
    for name, content in files.items():
        text = content.decode()
        count = len(text.splitlines())
        top = name.parts[0]
        if top == PACKAGE:
            in_tools = len(name.parts) > 2 and name.parts[1] == "tools"
            lines["package"] += count
            lines["tools" if in_tools else "core"] += count
            rooms = name.parts[1:3] if in_tools else name.parts[1:2]
            lines[f"- {'/'.join(rooms)}"] += count
            if name.suffix == ".py":
                modules.append(text)
        elif top in ("tests", "scripts", "examples", "docs"):
            lines[top] += count
    order = ["package", "core", *sorted(n for n in lines if n[0] == "-" and "tools" not in n)]
    order += ["tools", *sorted(n for n in lines if n[0] == "-" and "tools" in n)]
    order += ["tests", "scripts", "examples", "docs"]
    shown = {name: f"{lines[name]:,}" for name in order if lines[name]}
    classes = [c for c in ast.parse(files[Path(PACKAGE, "flags.py")]).body
               if isinstance(c, ast.ClassDef) and c.name.endswith("Flags")]  # fmt: skip
    flags = [field for c in classes for field in c.body if isinstance(field, ast.AnnAssign)]
    pages = [name for name in files if str(name.parent) == "docs" and name.suffix == ".md"]
    return {
        **shown,
        "flags": str(len(flags)),
        "pages of docs in English": str(sum(not name.stem.endswith("_CN") for name in pages)),
        **style(modules),
        "tests / package": f"{lines['tests'] / lines['package']:.2f}",
    }


def style(modules: list[str]) -> Figures:
    """Return the figures of functions, comments and types of these sources."""
    lengths: list[int] = []
    num_lines = num_code = num_comments = num_arguments = num_any = 0
    for text in modules:
        tree = ast.parse(text)
        code, comments = lines_of(text, tree)
        num_lines, num_code = num_lines + len(text.splitlines()), num_code + code
        num_comments += comments
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
            if isinstance(node, ast.arg):
                num_arguments += 1
                num_any += node.annotation is not None and ast.unparse(node.annotation) == "Any"
    lengths.sort()
    p90, longest = lengths[len(lengths) * 9 // 10], lengths[-1]
    return {
        "functions per 1,000 code lines": f"{1000 * len(lengths) / num_code:.0f}",
        "lines of a function: median / p90 / max": f"{median(lengths):.0f} / {p90} / {longest}",
        "lines of comments": f"{num_comments / num_lines:.1%}",
        "arguments typed Any, of all": f"{num_any / num_arguments:.1%}",
    }


def lines_of(text: str, tree: ast.Module) -> tuple[int, int]:
    """Return the numbers of code lines and of lines with only a comment."""
    strings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            strings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code, comments = set(), set()
    no_code = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in no_code:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - strings), len(comments - code)


if __name__ == "__main__":
    main()
