"""The experiment's plots: the seeds' spread, group sizes, rollouts with and without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from plan import BASE, NO_VLLM, VARIANTS
from records import Record, of_variant
from result_tables import compared

WINDOW = 10
"""Steps of the moving average."""

Y_LABEL = f"mean reward, average of {WINDOW} steps"
COLOURS = {
    "g2": "#d55e00",
    "g4": "#e69f00",
    "g8": "#0072b2",
    "g16": "#009e73",
    "no-vllm": "#777777",
}


def smooth(values: Sequence[float], window: int = WINDOW) -> np.ndarray:
    """Moving average over the last `window` values, over fewer at the start."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def smooth_rewards(records: Sequence[Record]) -> np.ndarray:
    """One row a run, one column a step."""
    return np.stack([smooth(record.curves["reward"]) for record in records])


def draw(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Write the plots that these runs allow; their paths."""
    names = {record.variant for record in records}
    plots = []
    if len(of_variant(records, BASE.name)) > 1:
        plots.append((folder / "seeds.png", plot_seeds(records)))
    if len(names - {NO_VLLM.name}) > 1:
        plots.append((folder / "group_size.png", plot_group_sizes(records)))
    if {BASE.name, NO_VLLM.name} <= names:
        plots.append((folder / "vllm.png", plot_vllm(records)))
    for path, figure in plots:
        figure.savefig(path, dpi=90, facecolor="white")
    return [path for path, _ in plots]


def plot_seeds(records: Sequence[Record]) -> Figure:
    """Every seed, the mean over seeds, and the range from the lowest to the highest seed."""
    chosen = of_variant(records, BASE.name)
    rewards = smooth_rewards(chosen)
    steps = np.arange(1, rewards.shape[1] + 1)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    low, high = rewards.min(axis=0), rewards.max(axis=0)
    axes.fill_between(steps, low, high, alpha=0.2, color=COLOURS["g8"], label="lowest to highest")
    for row in rewards:
        axes.plot(steps, row, color=COLOURS["g8"], alpha=0.35, linewidth=0.8)
    axes.plot(steps, rewards.mean(axis=0), color=COLOURS["g8"], label="mean of the seeds")
    seeds = ", ".join(str(record.seed) for record in chosen)
    finish(axes, title=f"GRPO on handwritten digits, seeds {seeds}")
    return figure


def plot_group_sizes(records: Sequence[Record]) -> Figure:
    """Reward, and the share of groups that teach nothing, by group size."""
    variants = [variant for variant in VARIANTS.values() if variant.vllm]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    reward, alike = figure.subplots(1, 2)
    for name, chosen in compared(records, variants).items():
        label = f"G = {VARIANTS[name].group_size} x {VARIANTS[name].prompts_a_step} prompts"
        rewards = smooth_rewards(chosen)
        steps = np.arange(1, rewards.shape[1] + 1)
        draw_range(reward, steps, rewards, name, label)
        shares = np.stack([smooth(record.curves["groups_alike"]) for record in chosen])
        alike.plot(steps, shares.mean(axis=0), color=COLOURS[name], label=label)
    finish(reward, title="64 completions a step, groups of G")
    finish(alike, title="Groups without a difference", y_label="share of a step's groups")
    alike.set_ylim(0, 1)
    return figure


def plot_vllm(records: Sequence[Record]) -> Figure:
    """Reward against steps and against the time that the steps took."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    by_step, by_time = figure.subplots(1, 2)
    for name, chosen in compared(records, [BASE, NO_VLLM]).items():
        label = "vLLM" if VARIANTS[name].vllm else "transformers"
        rewards = smooth_rewards(chosen)
        draw_range(by_step, np.arange(1, rewards.shape[1] + 1), rewards, name, label)
        for index, (record, row) in enumerate(zip(chosen, rewards, strict=True)):
            minutes = np.array(list(accumulate(record.curves["step_seconds"]))) / 60
            by_time.plot(minutes, row, color=COLOURS[name], label=label if index == 0 else None)
    finish(by_step, title="Rollouts by vLLM and by transformers")
    finish(by_time, title="The same against time, each seed", x_label="minutes of training")
    return figure


def draw_range(axes: Any, steps: np.ndarray, rewards: np.ndarray, name: str, label: str) -> None:
    """A variant's mean over its seeds, over the range from lowest to highest."""
    low, high = rewards.min(axis=0), rewards.max(axis=0)
    axes.fill_between(steps, low, high, alpha=0.2, color=COLOURS[name], linewidth=0)
    axes.plot(steps, rewards.mean(axis=0), color=COLOURS[name], label=label)


def finish(axes: Any, title: str, x_label: str = "optimizer step", y_label: str = Y_LABEL) -> None:
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
