"""Compares two runs: `swift-grpo-ext diff` and `swift-grpo-ext compare`.

`diff` joins two runs by the identity of their samples (phase, round, group, index, turn) and names
the first one that differs, in the order in which a training generates them. Later differences
follow from it. It also names the first update that differs, which is the cause if it is earlier,
and the settings that differ.

`compare` measures how much better candidate runs score than baselines, prompt by prompt. Runs with
one `--seed` meet the same prompts with the same noise. Chance that two such runs share cancels in
the difference of each prompt's mean rewards, which narrows the interval. The 95% interval of the
mean difference is Student's t.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import scipy

from swift_grpo_ext.record.query import Record, literal, open_record
from swift_grpo_ext.record.tables import SAMPLE_ID_COLUMNS
from swift_grpo_ext.sampling.seeding import Phase, SampleId
from swift_grpo_ext.tools.runs import by_step, find_run, find_runs, read_logs

Decode = Callable[[Sequence[int]], str]

# These columns of samples are compared, in the order in which one decides the next. If only the
# fingerprint differs, then tools, boxes or the content of media differ.
COMPARED = ("prompt", "media", "fingerprint", "seed", "weight_version", "token_ids",
            "finish_reason", "stop_reason", "text", "mask")  # fmt: skip
SHOWN = {"fingerprint": "the hash of prompt, tools, boxes and the content of media"}

SCORES = ("reward", "advantage")

# These values of `logging.jsonl` are compared, in the order in which one decides the next. Times,
# memory and cache hits differ in equal runs, too.
LOGGED = ("learning_rate", "loss", "grad_norm", "kl")

SAMPLE = ", ".join(f'"{name}"' for name in SAMPLE_ID_COLUMNS)
ROUND_IN_ORDER = "step, phase = 'train', number"  # an evaluation precedes the round of its step
IN_ROUND = '"group", "index", turn'
IN_ORDER = f"{ROUND_IN_ORDER}, {IN_ROUND}"

# These settings change no token: the places of a run, its outputs, and values that ms-swift derives
# from other settings.
WHERE_ONLY = frozenset(
    ("output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "external_plugins",
     "add_version", "local_rank", "vllm_server_port", "vllm_server_base_url",
     "vllm_server_group_port", "logging_steps", "save_steps", "save_total_limit", "save_strategy",
     "report_to", "callbacks", "training_args", "ignore_data_skip", "rank", "model_dir",
     "model_suffix", "model_info", "model_meta", "template_meta")
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first value that differs."""

    place: SampleId
    what: str  # a column, `token N` (from 0), or `sample` or `round` if one run lacks it
    # The value in each run. A token has an id and a log-probability, and is None after the end of
    # the completion. A sample or a round is True if it is there, else False.
    values: tuple[Any, Any]

    def describe(
        self,
        where: tuple[str, str] = ("in A", "in B"),
        decoders: tuple[Decode | None, Decode | None] = (None, None),
    ) -> str:
        """Return a sentence that names the place and both values, each followed by its `where`; the
        decoders give the text of each run's tokens."""
        turn = self.place.turn and self.place.turn + 1  # the second is 2, as in `--max_turns`
        place, what = replace(self.place, turn=turn), SHOWN.get(self.what, self.what)
        texts = [self._show(*each) for each in zip(self.values, decoders, strict=True)]
        # Long prompts often begin alike.
        start = max(len(os.path.commonprefix(texts)) - 20, 0)  # noqa: RUF071
        one, other = (
            f"{'…' * (start > 0)}{text[start : start + 80]}{'…' * (len(text) > start + 80)}"
            for text in texts
        )
        return f"{place}: {what} is {one} {where[0]} and {other} {where[1]}"

    def _show(self, value: Any, decode: Decode | None) -> str:
        if value is None or isinstance(value, bool):
            return "there" if value else "missing"
        if not isinstance(value, dict):
            value = json.loads(value) if self.what == "prompt" else value
            return json.dumps(value, ensure_ascii=False)
        notes = [json.dumps(decode([value["id"]]), ensure_ascii=False)] if decode else []
        if value["logprob"] is not None:
            notes.append(f"log-probability {value['logprob']:.3f}")
        return f"id {value['id']}" + (f" ({', '.join(notes)})" if notes else "")


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The result of `diff`, as `--json` prints it."""

    difference: Difference | None
    num_samples: int  # before the first difference; all turns of a conversation are one

    logprob_gap: float
    """The largest difference of log-probabilities in nats, over all tokens before the first
    difference. The record rounds each (`record.tables`). Up to about 1e-3 in float32 and 0.1 in
    bfloat16 the weights are the same, and a token that differs was a near tie."""

    update: str | None  # the first update that differs, as a sentence
    num_steps: int  # in both logs before that update
    checkpoint: str | None  # the last one that both runs have, if no update before it differs
    settings: dict[str, tuple[Any, ...]]  # those of `args.json` that differ

    @property
    def is_equal(self) -> bool:
        """Return whether the runs are equal, apart from log-probabilities (`logprob_gap`)."""
        return self.difference is None and self.update is None


def diff(one: Record, other: Record) -> Diff:
    """Compare two runs up to the first difference; raises ValueError if no round is common."""
    folders = one.run_dir, other.run_dir
    if set(one.rounds()).isdisjoint(other.rounds()):
        raise ValueError(f"{folders[0]} and {folders[1]} have no round in common.")
    difference, gap, is_before = None, 0.0, "true"
    if sample := _first_differing(one, other):
        difference, gap = _compare_at(sample, one, other)
        phase, step, number, *in_round = astuple(sample)
        is_before = f"({IN_ORDER}) < {(step, phase == 'train', number, *in_round)}"
    counted = f"select count(*) as num from samples where turn = 0 and {is_before}"
    [num_samples] = one.table(counted)["num"].to_pylist()
    num_steps, checkpoint, update = compare_updates(*folders)
    return Diff(
        difference=difference,
        num_samples=num_samples,
        logprob_gap=max(gap, _largest_gap(is_before, one, other)),
        update=update,
        num_steps=num_steps,
        checkpoint=checkpoint,
        settings=differing_settings(*map(read_args, folders)),
    )


def _first_differing(one: Record, other: Record) -> SampleId | None:
    """Return a sample of the first round that differs: the first that differs, or else the first
    with another score; None if all agree."""
    # A score that only one run has does not count: `<>` with a null is null.
    query = (
        f"select {SAMPLE}, hash({', '.join(COMPARED)}) as content, "
        f"if(fate = 'generated', null, hash({', '.join(SCORES)})) as score from scored"
    )
    cursor = one.cursor()
    cursor.register("other", other.table(query))
    row = cursor.execute(
        f"with one as ({query}) select {SAMPLE} from one full join other using ({SAMPLE}) "
        "where one.content is distinct from other.content or one.score <> other.score "
        f"order by {ROUND_IN_ORDER}, one.content is not distinct from other.content, {IN_ROUND} "
        "limit 1"
    ).fetchone()
    return SampleId(**dict(zip(SAMPLE_ID_COLUMNS, row, strict=True))) if row else None


def _compare_at(sample: SampleId, one: Record, other: Record) -> tuple[Difference, float]:
    """Return the difference of the sample that `_first_differing` found, and the largest gap of its
    log-probabilities before it, in nats."""
    where = " and ".join(f'"{name}" = {value!r}' for name, value in asdict(sample).items())
    rows = [record.rows(f"from scored where {where}") for record in (one, other)]
    if not all(rows):
        has_both = sample.round in one.rounds() and sample.round in other.rounds()
        what, values = "sample" if has_both else "round", (bool(rows[0]), bool(rows[1]))
        return Difference(place=sample, what=what, values=values), 0.0
    a, b = (found[0] for found in rows)
    difference, gap = compare_sample(sample, a, b)
    assert difference is not None
    # Log-probabilities of different prompts have nothing in common.
    return difference, gap or 0.0 if a["fingerprint"] == b["fingerprint"] else 0.0


def _largest_gap(is_before: str, one: Record, other: Record) -> float:
    """Return the largest difference of log-probabilities in nats, over the samples before the
    first difference; their tokens are equal."""
    query = f"select logprobs from samples where {is_before} order by {IN_ORDER}"
    columns = [record.table(query)["logprobs"].combine_chunks() for record in (one, other)]
    are_known = pc.and_(*(column.is_valid() for column in columns))
    values = [
        column.filter(are_known).flatten().to_numpy(zero_copy_only=False) for column in columns
    ]
    return logprob_gap(*values) or 0.0


def compare_sample(
    place: SampleId, one: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[Difference | None, float | None]:
    """Compare the tokens, log-probabilities, and other columns if given, of one sample or turn;
    return the first difference, and the largest gap of log-probabilities before it in nats, None
    if a side has none."""
    end = first_difference(one["token_ids"], other["token_ids"])
    gap = logprob_gap(one["logprobs"], other["logprobs"], end)
    names = (name for name in (*COMPARED, *SCORES) if one.get(name) != other.get(name))
    what = next(names, None)
    if what is None:
        return None, gap
    if what == "token_ids" and end is not None:
        values = _token(one, end), _token(other, end)
        return Difference(place=place, what=f"token {end}", values=values), gap
    return Difference(place=place, what=what, values=(one[what], other[what])), gap


def _token(row: Mapping[str, Any], position: int) -> dict[str, Any] | None:
    if position >= len(row["token_ids"]):
        return None
    logprobs = row["logprobs"]
    return {"id": row["token_ids"][position], "logprob": logprobs and logprobs[position]}


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """Return the first position where tokens differ or one side has ended; None if all agree."""
    pairs = enumerate(zip_longest(one, other))
    return next((position for position, (a, b) in pairs if a != b), None)


def logprob_gap(
    one: Sequence[float] | None, other: Sequence[float] | None, end: int | None = None
) -> float | None:
    """Return the largest difference of log-probabilities of tokens before `end`, in nats; None
    if a side has none."""
    if one is None or other is None or not len(one[:end]) or not len(other[:end]):
        return None
    # Two infinities of one sign do not differ; their difference would be NaN.
    a, b = np.asarray(one[:end]), np.asarray(other[:end])
    with np.errstate(invalid="ignore"):
        return float(np.where(a == b, 0.0, np.abs(a - b)).max())


def compare_updates(run_a: Path, run_b: Path) -> tuple[int, str | None, str | None]:
    """Return the number of equal steps in both logs, the last checkpoint that both runs have, and
    the first difference as a sentence; checkpoints are compared if the logs do not differ."""
    logs = [by_step(read_logs(run)) for run in (run_a, run_b)]
    common = sorted(logs[0].keys() & logs[1].keys())
    for num_equal, step in enumerate(common):
        for name in LOGGED:
            one, other = (log[step].get(name, "missing") for log in logs)
            if repr(one) != repr(other):  # NaN is NaN
                return num_equal, None, f"step {step}: {name} is {one} in A and {other} in B"
    names = {path.name for path in run_a.glob("checkpoint-*") if (run_b / path.name).is_dir()}
    steps = [int(number) for name in names if (number := name.partition("-")[2]).isdecimal()]
    if not steps:
        return len(common), None, None
    checkpoint = f"checkpoint-{max(steps)}"
    folders = run_a / checkpoint, run_b / checkpoint
    files = {file.name for folder in folders for file in folder.glob("*.safetensors")}
    _, differing, missing = filecmp.cmpfiles(*folders, files, shallow=False)
    if sample := sorted([*differing, *missing]):
        return len(common), None, f"the weights differ, {checkpoint}/{sample[0]}"
    return len(common), checkpoint if files else None, None


def read_args(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings of a run's `args.json`; empty if it cannot be read."""
    try:
        return dict(json.loads(Path(run_dir, "args.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def find_decoder(run_dir: Path) -> Decode | None:
    """Return a function from a run's token ids to text, with the tokenizer of a checkpoint or of
    the model; None if this machine has neither."""
    from tokenizers import Tokenizer

    folders = sorted(run_dir.glob("checkpoint-*"))
    if model := read_args(run_dir).get("model"):
        folders.append(Path(model))
    for folder in folders:
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # the package raises no narrower class
            continue
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    return None


def differing_settings(*runs: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the settings that differ, with each run's value; none if a run has no settings."""
    if not all(runs):
        return {}
    names = dict.fromkeys(name for run in runs for name in run if name not in WHERE_ONLY)
    values = {name: tuple(run.get(name) for run in runs) for name in names}
    return {name: own for name, own in values.items() if any(value != own[0] for value in own)}


def run_diff(options: argparse.Namespace) -> int:
    """Print the differences; return 0 for equal runs, else 1."""
    run_a, run_b = find_run(options.run_a), find_run(options.run_b)
    result = diff(open_record(run_a), open_record(run_b))
    if options.json:
        print(json.dumps(asdict(result), ensure_ascii=False, indent=2))
        return int(not result.is_equal)
    print(f"A: {run_a}\nB: {run_b}")
    to_the_end = " to the end" if result.is_equal and not result.logprob_gap else ""
    print(
        f"Equal{to_the_end}: {result.num_samples:,} samples (prompts, media, seeds, tokens, "
        f"rewards and advantages; log-probabilities within {result.logprob_gap:.1e} nats), "
        f"{result.num_steps:,} logged steps ({', '.join(LOGGED)}), and the weights of "
        f"{result.checkpoint or 'no checkpoint'}."
    )
    if result.difference is not None:
        decoders = find_decoder(run_a), find_decoder(run_b)
        print(f"First difference: {result.difference.describe(decoders=decoders)}.")
    if result.update is not None:
        print(f"First update that differs: {result.update}.")
    if result.settings:
        print("Settings that differ, in A and B:")
    for name, (one, other) in result.settings.items():
        print(f"  --{name}: {str(one)[:80]} and {str(other)[:80]}")
    return int(not result.is_equal)


# --- compare ---


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of `compare`, as `--json` prints it."""

    num_pairs: int
    num_prompts: int  # prompts that both runs of a pair met, summed over pairs
    num_alone: int  # prompts that only one run of a pair met: they are left out
    baseline: float  # mean rewards, over pairs and their prompts
    candidate: float
    difference: float
    interval: tuple[float, float]  # of the difference, at 95%
    differences: dict[str, float]  # of each pair, by seed
    steps: dict[str, tuple[int, int]]  # the first and the last that were compared, by seed


class Pair(NamedTuple):
    """The prompts that two runs have in common."""

    means: dict[str, tuple[float, float]]  # mean rewards of the prompts that both met, by hash
    num_alone: int  # prompts that one of them met
    steps: tuple[int, int]  # the first and the last that both have, and that are compared


def pair_by_seed(
    baselines: Sequence[Path], candidates: Sequence[Path]
) -> dict[str, tuple[Path, Path]]:
    """Return pairs of folders of runs with the same `--seed`, by that seed; one run on each
    side is a pair for any seeds. Raises ValueError if a seed is on one side only, or twice."""
    one, other = (
        {str(read_args(folder).get("seed", "unknown")): folder for folder in side}
        for side in (baselines, candidates)
    )
    if len(baselines) == len(candidates) == 1:
        return {next(iter(one)): (baselines[0], candidates[0])}
    counts = len(baselines), len(candidates)
    if one.keys() != other.keys() or counts != (len(one), len(other)):
        raise ValueError(
            f"--baseline has {counts[0]} runs of the seeds {', '.join(one)} and --candidate "
            f"{counts[1]} of {', '.join(other)}; expected each seed once on both sides. Give runs "
            "that were started with equal --seed."
        )
    return {seed: (run, other[seed]) for seed, run in one.items()}


def read_pair(
    *records: Record,
    phase: Phase = "train",
    steps: range | None = None,
    reward: str | None = None,
) -> Pair:
    """Read two runs in the steps that both have, among `steps`; `reward` names a reward function,
    None the total. Raises ValueError if no scored step is common, or a run lacks the function.
    """
    value = "reward" if reward is None else f"rewards[{literal(reward)}]"
    # The first turn of a conversation has its prompt; all turns share one score.
    scored = f"from scored where turn = 0 and phase = {literal(phase)} and {value} is not null"
    query = "select distinct unnest(map_keys(rewards)) as name from rewards order by name"
    for record in records if reward else ():
        names = [row["name"] for row in record.rows(query)]
        if reward not in names:
            raise ValueError(f"--reward {reward!r}: {record.run_dir} has {', '.join(names)}.")
    query = f"select distinct step {scored}"
    own_steps = [{row["step"] for row in record.rows(query)} for record in records]
    # Rewards rise as a run goes on: a step that only one run has would shift its mean.
    common = sorted(step for step in set.intersection(*own_steps) if steps is None or step in steps)
    if not common:
        had = " and ".join(
            f"{record.run_dir} has {f'the steps {min(own)} to {max(own)}' if own else 'none'}"
            for record, own in zip(records, own_steps, strict=True)
        )
        raise ValueError(f"expected common scored {phase} steps (--steps narrows them); {had}.")
    query = (
        f"select fingerprint, favg({value}) as mean {scored} and list_contains(?, step) "
        "group by fingerprint order by fingerprint"
    )
    one, other = (
        {row["fingerprint"]: row["mean"] for row in record.rows(query, [common])}
        for record in records
    )
    means = {prompt: (one[prompt], other[prompt]) for prompt in one if prompt in other}
    return Pair(means, len(one.keys() ^ other.keys()), (common[0], common[-1]))


def compare(pairs: Mapping[str, Pair]) -> Comparison:
    """Compare the mean rewards of each prompt in pairs of runs, given by seed; raises
    ValueError if a pair has fewer than two prompts in common."""
    for seed, pair in pairs.items():
        if len(pair.means) < 2:
            raise ValueError(
                f"The runs of seed {seed} have {len(pair.means)} prompts in common, expected 2 or "
                "more: a prompt is known by its row, paths of images included. Give runs on one "
                "data set in one folder."
            )
    means = [np.array([*pair.means.values()]) for pair in pairs.values()]
    baseline, candidate = np.array([each.mean(axis=0) for each in means]).T
    gains = candidate - baseline
    # Prompts within a run are not independent: each of several pairs counts as one value. In a
    # single pair each prompt counts, and other seeds may give other results.
    units = gains if len(pairs) > 1 else np.diff(means[0]).ravel()
    # `scipy.stats` has Student's t too, and takes 70 MB and a second to import.
    margin = float(
        scipy.special.stdtrit(len(units) - 1, 0.975) * units.std(ddof=1) / len(units) ** 0.5
    )
    difference = float(gains.mean())
    return Comparison(
        num_pairs=len(pairs),
        num_prompts=sum(map(len, means)),
        num_alone=sum(pair.num_alone for pair in pairs.values()),
        baseline=float(baseline.mean()),
        candidate=float(candidate.mean()),
        difference=difference,
        interval=(difference - margin, difference + margin),
        differences=dict(zip(pairs, gains.tolist(), strict=True)),
        steps={seed: pair.steps for seed, pair in pairs.items()},
    )


def run_compare(options: argparse.Namespace) -> int:
    """Print the comparison as a table or as JSON."""
    sides = [
        [run for folder in folders for run in find_runs(folder)]
        for folders in (options.baseline, options.candidate)
    ]
    chosen = {"phase": options.phase, "steps": options.steps, "reward": options.reward}
    named = pair_by_seed(*sides).items()
    pairs = {seed: read_pair(*map(open_record, runs), **chosen) for seed, runs in named}
    result = compare(pairs)
    if options.json:
        print(json.dumps(asdict(result), indent=2))
        return 0
    low, high = result.interval
    print(f"{result.num_pairs} pair(s) of runs, {result.num_prompts:,} prompts")
    print(f"  baseline    {result.baseline:8.4f}")
    print(f"  candidate   {result.candidate:8.4f}")
    print(f"  difference  {result.difference:+8.4f}  [{low:+.4f}, {high:+.4f}] (95%)")
    for seed, gain in result.differences.items():
        first, last = result.steps[seed]
        print(f"  seed {seed:6} {gain:+8.4f}  in the steps {first} to {last}, which both runs have")
    if result.num_alone:
        print(f"{result.num_alone:,} prompts that only one run of a pair met are left out.")
    if result.num_pairs == 1:
        print("One pair says nothing about other seeds.")
    return 0
