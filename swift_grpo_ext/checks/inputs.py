"""Checks of what a run is given: settings, model, template, data, servers."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from requests.utils import get_netrc_auth

from swift_grpo_ext.checks import check
from swift_grpo_ext.checks.result import Result, green, red, yellow
from swift_grpo_ext.checks.wanted import Wanted
from swift_grpo_ext.rollout import wire

NUM_ROWS = 32
"""Of a data set, that are looked at."""

SERVER_SECONDS = 5


def check_settings(wanted: Wanted) -> Result | None:
    """The YAML file's settings hold together."""
    if wanted.run is None:
        return None
    findings = [f for f in check(wanted.run) if f.level != "note"]
    errors = [f for f in findings if f.level == "error"]
    if errors:
        found = "; ".join(f"{f.setting}: {f.text}" for f in errors)
        return red("settings", found, "Change the file; `swift-grpo-ext check` shows all findings.")
    if findings:
        return yellow("settings", "; ".join(f"{f.setting}: {f.text}" for f in findings))
    return green("settings", "hold together")


# --- model and template ---


def check_logits(wanted: Wanted) -> Result | None:
    """How the model is asked for the logits of completions only."""
    if wanted.model is None:
        return None
    name, folder = "logits", Path(wanted.model).expanduser()
    if not folder.is_dir():
        return _no_model(name, wanted.model)
    if not (folder / "config.json").is_file():
        return red(name, f"{folder} holds no config.json", "Name the folder of a model's weights.")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return logits_keyword(config)


def logits_keyword(config: dict[str, Any]) -> Result:
    """
    Args:
        config: a model's config.json.
    """
    import transformers

    from swift_grpo_ext.logits.shim import keyword_of

    name, architecture = "logits", (config.get("architectures") or ["none"])[0]
    if "auto_map" in config:
        return yellow(name, f"{architecture} brings its own code, which is not run here")
    model_class: Any = getattr(transformers, architecture, None)
    if model_class is None:
        return red(
            name,
            f"transformers {transformers.__version__} has no {architecture}",
            "Install a version that has it, within the versions that work together.",
        )
    keyword = keyword_of(model_class)
    if keyword is None:
        return yellow(
            name,
            f"{architecture} takes no keyword for them",
            "--logits_shim auto computes those of completions only, at the model's head.",
        )
    return green(name, f"{architecture} takes {keyword}")


def _no_model(name: str, model: str) -> Result:
    if model.startswith(("/", ".", "~")):
        return red(name, f"{model} is no folder", "Name the folder of a model's weights.")
    return yellow(name, f"{model} is a hub id, which is not downloaded here", "Name a folder.")


def check_template(wanted: Wanted) -> Result | None:
    """What ends a completion, and whether the stop words can be meant."""
    if wanted.model is None:
        return None
    name = "template"
    if not Path(wanted.model).expanduser().is_dir():
        return _no_model(name, wanted.model)
    from swift.model import get_processor
    from swift.template import get_template

    from swift_grpo_ext.stops.templates import check_template_stops, end_ids

    try:
        processor = get_processor(wanted.model, model_type=wanted.model_type)
        template = get_template(processor, template_type=wanted.template)
    except (ValueError, KeyError, OSError) as e:
        text = " ".join(str(e).split())
        return red(name, text[:300], "Give --model_type and --template, as for swift rlhf.")
    try:
        settings = SimpleNamespace(stop_words=wanted.stop_words, stop_token_ids=[])
        check_template_stops(settings, template)
    except ValueError as e:
        return red(name, str(e), "Change --stop_words.")
    ends = template.tokenizer.convert_ids_to_tokens(sorted(end_ids(template)))
    words = ", ".join(map(repr, wanted.stop_words)) or "none"
    found = f"{template.template_meta.template_type}: a turn ends with {' or '.join(ends)}"
    return green(name, f"{found}; stop words: {words}")


# --- data ---


def check_data(wanted: Wanted) -> Iterator[Result]:
    for dataset in wanted.datasets:
        yield rows_of(dataset)


def rows_of(dataset: str) -> Result:
    """The first rows of a data set as ms-swift loads them, with their images."""
    from swift.dataset import load_dataset

    from swift_grpo_ext.checks.rows import MEDIA, bad_media, question_of

    name = "data"
    looks_local = Path(dataset).suffix in (".json", ".jsonl", ".csv", ".parquet")
    if not Path(dataset).exists():
        if looks_local or dataset.startswith(("/", ".", "~")):
            return red(name, f"{dataset} does not exist", "Name a file of rows, with --dataset.")
        return yellow(name, f"{dataset} is a hub id, which is not downloaded here", "Name a file.")
    try:
        loaded, _ = load_dataset([dataset], streaming=True, remove_unused_columns=False)
        rows = list(islice(iter(loaded), NUM_ROWS))
    except Exception as e:  # `datasets` and ms-swift raise many kinds
        text = " ".join(str(e).split())
        remedy = 'Expected rows such as {"messages": [...], "images": ["1.png"], "solution": "3"}.'
        return red(name, f"{dataset} cannot be read ({type(e).__name__}: {text[:200]})", remedy)
    if not rows:
        return red(name, f"{dataset} holds no rows that ms-swift can use", "Name another file.")
    for row in rows:
        reason = bad_media(row)
        if reason:
            return red(
                name,
                f"{dataset}: in the row that asks {question_of(row)!r}, {reason}",
                "Correct the row; paths hold from the working directory or from ROOT_IMAGE_DIR.",
            )
    with_media = sum(any(row.get(key) for key in MEDIA) for row in rows)
    found = f"{dataset}: {with_media} of the first {len(rows)} rows hold images, videos or audios"
    if with_media == 0:
        return yellow(name, found, "Add the column `images`, or map yours with --columns.")
    return green(name, found)


# --- servers ---


def check_servers(wanted: Wanted) -> Iterator[Result]:
    for server in wanted.servers:
        yield plugin_of(server, is_started=True)
    for server in wanted.future_servers:
        yield plugin_of(server, is_started=False)


def plugin_of(server: str, *, is_started: bool) -> Result:
    """A server answers, and speaks this version of our wire format.

    Args:
        server: its URL.
        is_started: whether it has to be there already.
    """
    name = f"server {server}"
    start = "Start it: swift rollout --external_plugins $(swift-grpo-ext plugin-path) ..."
    try:
        _ask(f"{server}/health")
    except (OSError, ValueError) as e:
        answer = red if is_started else yellow
        return answer(name, f"does not answer ({getattr(e, 'reason', e)})", start)
    try:
        ours = _ask(f"{server}/get_engine_type/", method="POST").get(wire.KEY)
    except urllib.error.HTTPError as e:
        if e.code == 401:
            answer = red if is_started else yellow
            return answer(name, "does not get its API key from here", f"{_api_key_remedy()}.")
        return red(name, f"answers {e.code} to /get_engine_type/: no swift rollout?", start)
    except (OSError, ValueError) as e:
        return red(name, f"is healthy, but does not say what it is ({e})", start)
    if ours is None:
        return red(name, "runs without swift-grpo-ext", start)
    try:
        wire.check_version(ours, name)
    except wire.WireError as e:
        return red(name, str(e), "Install the same version of swift-grpo-ext on both sides.")
    return green(name, f"wire format {ours['version']}, {ours['replicas']} replica(s)")


def _api_key_remedy() -> str:
    from swift_grpo_ext.upstream.api_key import REMEDY

    return REMEDY


def _ask(url: str, method: str = "GET") -> dict[str, Any]:
    """A JSON answer, past any proxy, with the API key that a training would send."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, method=method)
    from_netrc = get_netrc_auth(url)
    if from_netrc:
        credentials = base64.b64encode(":".join(from_netrc).encode()).decode()
        request.add_header("Authorization", f"Basic {credentials}")
    with opener.open(request, timeout=SERVER_SECONDS) as response:
        answer = json.loads(response.read() or b"{}")
    if not isinstance(answer, dict):
        raise ValueError(f"{url} answers {answer!r}")
    return answer


CHECKS: tuple[Callable[[Wanted], Result | Iterator[Result] | None], ...] = (
    check_settings,
    check_logits,
    check_template,
    check_data,
    check_servers,
)
