"""Print a table of the project's lines by room, and of its functions, comments and types.

All lines of .py, .sh, .md, .html, .js and .css files count, but links do not. Code lines exclude
empty lines, comments and docstrings.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tokenize
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "swift_grpo_ext"
COUNTED = (".py", ".sh", ".md", ".html", ".js", ".css")


def main() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = (ROOT / name for name in listed.splitlines())
    files = {
        path.relative_to(ROOT): path.read_text(encoding="utf-8")
        for path in paths
        if path.suffix in COUNTED and path.is_file() and not path.is_symlink()
    }
    print("| | now |\n|---|---|")
    for name, value in figures(files).items():
        print(f"| {name} | {value} |")


def figures(files: dict[Path, str]) -> dict[str, str]:
    """Return the table's values by name."""
    lines: dict[str, Counter[str]] = {"core": Counter(), "tools": Counter(), "others": Counter()}
    for path, text in files.items():
        part, room = "others", path.parts[0]
        if room == PACKAGE:
            in_tools = len(path.parts) > 2 and path.parts[1] == "tools"
            part = "tools" if in_tools else "core"
            room = "/".join(path.parts[1:3] if in_tools else path.parts[1:2])
        lines[part][room] += len(text.splitlines())
    rows = {"package": lines["core"].total() + lines["tools"].total()}
    for part in ("core", "tools"):
        rows[part] = lines[part].total()
        rows |= {f"- {room}": count for room, count in sorted(lines[part].items()) if count}
    rows |= {room: lines["others"][room] for room in ("tests", "scripts", "examples", "docs")}
    classes = [c for c in ast.parse(files[Path(PACKAGE, "flags.py")]).body
               if isinstance(c, ast.ClassDef) and c.name.endswith("Flags")]  # fmt: skip
    flags = [field for c in classes for field in c.body if isinstance(field, ast.AnnAssign)]
    pages = [path for path in files if str(path.parent) == "docs" and path.suffix == ".md"]
    modules = [t for path, t in files.items() if path.parts[0] == PACKAGE and path.suffix == ".py"]
    return {
        **{name: f"{count:,}" for name, count in rows.items()},
        "flags": str(len(flags)),
        "pages of docs in English": str(sum(not path.stem.endswith("_CN") for path in pages)),
        **style(modules),
        "tests / package": f"{rows['tests'] / rows['package']:.2f}",
    }


def style(modules: Sequence[str]) -> dict[str, str]:
    """Return the values of functions, comments and types of these sources."""
    trees = [ast.parse(text) for text in modules]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = sorted((f.end_lineno or f.lineno) - f.lineno + 1 for f in functions)
    types = [n.annotation and ast.unparse(n.annotation) for n in nodes if isinstance(n, ast.arg)]
    num_lines = sum(len(text.splitlines()) for text in modules)
    counts = [lines_of(text, tree) for text, tree in zip(modules, trees, strict=True)]
    num_code, num_comments = (sum(column) for column in zip(*counts, strict=True))
    p90, longest = lengths[len(lengths) * 9 // 10], lengths[-1]
    return {
        "functions per 1,000 code lines": f"{1000 * len(lengths) / num_code:.0f}",
        "lines of a function: median / p90 / max": f"{median(lengths):.0f} / {p90} / {longest}",
        "lines of comments": f"{num_comments / num_lines:.1%}",
        "arguments typed Any, of all": f"{types.count('Any') / len(types):.1%}",
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
