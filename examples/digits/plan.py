"""Which runs the experiment consists of: the published settings, and variations of them.

Every run draws 64 completions a step for 200 steps; a variation changes one thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SEEDS = (*range(1, 10), 42)
VARIATION_SEEDS = (1, 2)
"""Seeds of each variation; it is compared with the published settings at these seeds alone."""

NUM_STEPS = 200
COMPLETIONS_A_STEP = 64
NUM_TRAINING_IMAGES = 512


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One setting of the demo."""

    name: str
    """Begins the names of its runs: `g8` and seed 1 make `g8-seed1`."""

    part: str
    """The part of the experiment that it belongs to."""

    group_size: int = 8
    vllm: bool = True

    @property
    def arguments(self) -> tuple[str, ...]:
        """What `scripts/demo.sh` gets, to pass on to `swift rlhf`; nothing for the demo itself."""
        group_size = ("--num_generations", str(self.group_size)) if self.group_size != 8 else ()
        return group_size if self.vllm else (*group_size, "--use_vllm", "false")

    @property
    def prompts_a_step(self) -> int:
        return COMPLETIONS_A_STEP // self.group_size

    @property
    def epochs(self) -> float:
        """How often a run sees each training image."""
        return NUM_STEPS * self.prompts_a_step / NUM_TRAINING_IMAGES


BASE = Variant(name="g8", part="seeds")
NO_VLLM = Variant(name="no-vllm", part="vllm", vllm=False)
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(name="g2", part="group-size", group_size=2),
        Variant(name="g4", part="group-size", group_size=4),
        BASE,
        Variant(name="g16", part="group-size", group_size=16),
        NO_VLLM,
    )
}
PARTS = ("seeds", "group-size", "vllm")


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run: a variant with a seed."""

    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant.name}-seed{self.seed}"

    @property
    def command(self) -> str:
        """What makes this run, in a shell; DIR is the experiment's folder."""
        words = ["OMP_NUM_THREADS=1", f"SEED={self.seed}", f"RUN=DIR/{self.name}"]
        return " ".join([*words, "bash scripts/demo.sh", *self.variant.arguments])


def plan(parts: Sequence[str] = PARTS) -> list[PlannedRun]:
    """The runs of the named parts, in the order in which they are made: both seeds of a variation
    come after the first of all others, so that whoever stops early has one of each.
    """
    seeds = [PlannedRun(variant=BASE, seed=seed) for seed in SEEDS if "seeds" in parts]
    variations = [
        PlannedRun(variant=variant, seed=seed)
        for seed in VARIATION_SEEDS
        for variant in VARIANTS.values()
        if variant is not BASE and variant.part in parts
    ]
    return seeds + variations
