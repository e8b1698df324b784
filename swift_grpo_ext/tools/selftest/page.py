"""Results as a table, as JSON, and as one HTML page for a bug report, without secrets."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from rich.markup import escape
from rich.table import Column, Table

from swift_grpo_ext.tools.check.machine import SHOWN, installed_versions
from swift_grpo_ext.tools.selftest.result import Result
from swift_grpo_ext.version import __version__

COLORS = {"holds": "green", "does not hold": "red", "could not be tried": "yellow"}
MASK = "***"
SECRET_NAME = re.compile(r"(?i)(key|token|secret|passw|credential)")
NO_SECRET = re.compile(r"(?i)(tokens|token_ids|tokenize|max_token|special_token)")
"""Names of settings that only sound so."""

PATTERNS = (
    (re.compile(r"(?i)(bearer\s+)\S+"), rf"\1{MASK}"),
    (re.compile(r"(://)[^/\s:@]+:[^/\s@]+@"), rf"\1{MASK}@"),
    (re.compile(r"\b(hf_|sk-|ms-)[A-Za-z0-9_-]{10,}"), rf"\1{MASK}"),
)
SHORTEST_SECRET = 6


def masked(value: Any, env: Mapping[str, str] = os.environ) -> Any:
    """JSON values without secrets: those of environment variables and settings named so, keys and
    tokens by their look, and the paths of this user and this folder."""
    if isinstance(value, Mapping):
        return {
            name: MASK if _is_secret(str(name)) and content else masked(content, env)
            for name, content in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [masked(item, env) for item in value]
    return _masked_text(value, env) if isinstance(value, str) else value


def _is_secret(name: str) -> bool:
    return bool(SECRET_NAME.search(name)) and not NO_SECRET.search(name)


def _masked_text(text: str, env: Mapping[str, str]) -> str:
    hidden = {v for name, v in env.items() if _is_secret(name) and len(v) >= SHORTEST_SECRET}
    for secret in sorted(hidden, key=len, reverse=True):
        text = text.replace(secret, MASK)
    for pattern, instead in PATTERNS:
        text = pattern.sub(instead, text)
    places = {str(Path.cwd()): ".", env.get("HOME", ""): "~"}
    for place, instead in places.items():
        if len(place) > 1:
            text = re.sub(re.escape(place) + r"(?=$|[/\s'\",:;)\]])", instead, text)
    return re.sub(r"/(home|Users)/[^/\s]+", r"~", text)


def facts(device: str) -> dict[str, str]:
    """Versions, machine and card, for a report."""
    found = installed_versions()
    versions = {name: found[name] for name in SHOWN if name in found}
    return {
        "swift-grpo-ext": __version__,
        **versions,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "device": device,
    }


def device_words(count: int, kind: str) -> str:
    """`2 x NVIDIA H100 80GB HBM3, driver 570.86.10`, or the processor."""
    if kind == "cpu":
        return f"cpu, {len(os.sched_getaffinity(0))} cores, {platform.machine()}"
    if kind != "cuda" or shutil.which("nvidia-smi") is None:
        return f"{count} x {kind}"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.splitlines()
    name, _, driver = (lines or [kind])[0].partition(", ")
    return f"{count} x {name}, driver {driver}"


# --- as a table ---


def table(results: Sequence[Result]) -> Table:
    """A row for each result, under the name of its topology."""
    columns = (Column("check"), Column("result", no_wrap=True))
    shown = Table(*columns, Column("why, and measured", overflow="fold"))
    topology = ""
    for result in results:
        if result.topology != topology:
            topology = result.topology
            shown.add_section()
            shown.add_row("", "", f"[bold]{escape(topology)}[/]")
        text = [escape(masked(result.reason))] if result.reason else []
        text += [f"[bold]{escape(masked(result.remedy))}[/]"] if result.remedy else []
        text += [escape(_measured(result.values))] if result.values else []
        status = f"[{COLORS[result.status]}]{result.status}[/]"
        shown.add_row(result.name, status, "\n".join(text))
    return shown


def _measured(values: Mapping[str, Any]) -> str:
    """The numbers in one line; lists are left to JSON."""
    shown = {name: value for name, value in values.items() if not isinstance(value, list)}
    return "; ".join(f"{name}: {value}" for name, value in shown.items())


# --- as files ---


def write(
    folder: Path,
    results: Sequence[Result],
    settings: Mapping[str, Any],
    machine: Mapping[str, str],
) -> list[Path]:
    """Write `selftest.json` and `selftest.html`, with what is no secret; returns their paths."""
    body = masked(
        {
            "machine": dict(machine),
            "settings": dict(settings),
            "results": [asdict(result) for result in results],
        }
    )
    as_json, as_html = folder / "selftest.json", folder / "selftest.html"
    as_json.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    as_html.write_text(page(body), encoding="utf-8")
    return [as_json, as_html]


def page(body: Mapping[str, Any]) -> str:
    """One page that opens offline, and runs no script: texts of models and errors are hostile."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["shown"] = lambda value: (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )
    return environment.from_string(PAGE).render(**body, colors=COLORS)


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>swift-grpo-ext selftest</title>
<style>
:root { color-scheme: light dark; }
body { margin: 24px auto; max-width: 1100px; padding: 0 16px;
  font: 15px/1.5 system-ui, sans-serif; }
table { border-collapse: collapse; width: 100%; margin: 8px 0 28px; }
th, td { border: 1px solid #8886; padding: 6px 10px; text-align: left; vertical-align: top;
  overflow-wrap: anywhere; }
td.status, td:last-child { white-space: nowrap; }
td.status { font-weight: 600; }
.green { color: #2e8b57; } .red { color: #d0342c; } .yellow { color: #a06b00; }
dl { margin: 0; display: grid; grid-template-columns: max-content 1fr; gap: 0 12px;
  font-size: 13px; }
dt { opacity: .7; } dd { margin: 0; overflow-wrap: anywhere; } p { margin: 4px 0; }
</style>
</head>
<body>
<h1>swift-grpo-ext selftest</h1>
<table>
<tr><th>check</th><th>topology</th><th>result</th><th>why, and measured</th><th>s</th></tr>
{%- for r in results %}
<tr><td>{{ r.name }}</td><td>{{ r.topology }}</td>
<td class="status {{ colors[r.status] }}">{{ r.status }}</td>
<td>{% if r.reason %}<p>{{ r.reason }}</p>{% endif %}
{%- if r.remedy %}<p><b>{{ r.remedy }}</b></p>{% endif %}
<dl>{% for name, value in r["values"].items() %}<dt>{{ name }}</dt><dd>{{ value | shown }}</dd>
{%- endfor %}</dl></td><td>{{ r.seconds }}</td></tr>
{%- endfor %}
</table>
<h2>Machine</h2>
<dl>{% for name, value in machine.items() %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
<h2>Settings</h2>
<dl>{% for name, value in settings.items() %}<dt>{{ name }}</dt><dd>{{ value | shown }}</dd>
{%- endfor %}</dl>
<p>Secrets and home folders are masked. Read it before you share it: reasons may quote a prompt.</p>
</body>
</html>
"""
