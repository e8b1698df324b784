"""The command line as our flags see it: what YAML meant, what was given, what is unknown."""

from __future__ import annotations

import logging

import pytest
from swift.arguments import RLHFArguments, RolloutArguments
from swift.utils.utils import _patch_get_type_hints
from transformers import HfArgumentParser

from swift_grpo_ext import command_line
from swift_grpo_ext.flags import flag_names


@pytest.fixture(scope="module", params=[RLHFArguments, RolloutArguments])
def parser(request: pytest.FixtureRequest) -> HfArgumentParser:
    return command_line.Parser([command_line.EXTENDED[request.param]], allow_abbrev=False)


@pytest.mark.parametrize("upstream", [RLHFArguments, RolloutArguments])
def test_no_flag_of_ours_is_one_of_ms_swifts_or_an_abbreviation(upstream: type) -> None:
    with _patch_get_type_hints():
        actions = HfArgumentParser([upstream])._actions
    theirs = [option for action in actions for option in action.option_strings]
    for name in flag_names():
        clashes = [o for o in theirs if o.startswith((f"--{name}", f"--{name.replace('_', '-')}"))]
        assert clashes == [], name


def test_values_reach_the_arguments(parser: HfArgumentParser) -> None:
    argv = ["--stop_token_ids", "1", "2", "--logits-shim", "strict", "--diversity_alarm_p=1e-3"]
    namespace, leftover = parser.parse_known_args([*argv, "--logps_shared_prompt", "true"])
    assert leftover == []
    assert namespace.stop_token_ids == [1, 2]
    assert namespace.logits_shim == "strict"
    assert namespace.diversity_alarm_p == 1e-3
    assert namespace.logps_shared_prompt is True
    assert namespace.rollout_seed_mode == "sample"


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["--logits_shim", "False"], ["--logits_shim", "off"]),
        (["--logits-shim", "False", "--seed", "1"], ["--logits-shim", "off", "--seed", "1"]),
        (["--logps_shared_prompt", "False"], None),
        (["--logits_shim", "auto", "False"], None),
        (["False"], None),
        ([], None),
    ],
)
def test_yamls_off_is_off(argv: list[str], meant: list[str] | None) -> None:
    assert command_line.off_again(argv) == (argv if meant is None else meant)


def test_given_flags_are_known_in_every_spelling(parser: HfArgumentParser) -> None:
    argv = ["--logits-shim=off", "--stop_token_ids", "3", "--no_include_stop_str_in_output"]
    assert command_line._given(argv, parser) == [
        "logits_shim",
        "stop_token_ids",
        "include_stop_str_in_output",
    ]


def test_an_unknown_flag_is_named_with_the_nearest(parser: HfArgumentParser) -> None:
    with pytest.raises(ValueError, match=r"Unknown argument --logit-shim .*mean --logits_shim\?"):
        command_line._refuse(["--logit-shim", "off"], parser)
    with pytest.raises(ValueError, match=r"Unknown argument --zzzz .*`swift-grpo-ext flags`"):
        command_line._refuse(["--zzzz"], parser)


def test_a_bad_value_raises_instead_of_printing_all_usage(parser: HfArgumentParser) -> None:
    with pytest.raises(ValueError, match=r"--diversity_alarm_p.*invalid float value: 'many'"):
        parser.parse_known_args(["--diversity_alarm_p", "many"])


def test_registering_twice_is_harmless() -> None:
    from swift.arguments import BaseArguments
    from swift.trainers import TrainerFactory

    import swift_grpo_ext

    swift_grpo_ext.register()
    once = (BaseArguments._init_model_kwargs, dict(TrainerFactory.TRAINER_MAPPING))
    swift_grpo_ext.register()
    assert once == (BaseArguments._init_model_kwargs, dict(TrainerFactory.TRAINER_MAPPING))
    assert TrainerFactory.TRAINER_MAPPING["grpo"] == "swift_grpo_ext.training.RolloutGRPOTrainer"


def test_flags_that_ms_swift_calls_left_over() -> None:
    """They are not ignored."""
    said = "remaining_argv: ['--rollout_seed_mode', 'sample', '--stop_token_ids', '7']"
    record = logging.LogRecord("swift", logging.WARNING, "", 0, said, None, None)
    assert command_line._reword_leftovers(record)
    assert record.levelname == "INFO"
    assert record.getMessage() == (
        "Flags of swift-grpo-ext: --rollout_seed_mode sample --stop_token_ids 7"
    )
    other = logging.LogRecord("swift", logging.WARNING, "", 0, "other: [1]", None, None)
    assert command_line._reword_leftovers(other)
    assert other.getMessage() == "other: [1]"
    assert other.levelname == "WARNING"
