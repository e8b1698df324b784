"""The tiny Qwen2.5-VL without its warm start: tokenizer, template, sizes, compact vocabulary."""

import json
import math
from pathlib import Path

import make_tiny_vlm
import pytest
import torch
import transformers
from tiny_vlm import families
from tiny_vlm import tokenizer as tokenizer_module
from tiny_vlm.architecture import VOCAB_SIZE, build_model, make_config, make_processor
from tiny_vlm.compact_vocab import CompactVocab, expand, shrink
from tiny_vlm.examples import Examples, encode_answers, prompt_text
from tiny_vlm.output_folder import claim, finish, read_manifest
from tiny_vlm.quality import Quality, completion_log_probs, measure, split_log_probs
from tiny_vlm.warm_start import batches, is_warm, one_thread, training_loss
from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2TokenizerFast

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen cuts a text into words before the byte pairs."""


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return tokenizer_module.read_ranks(tokenizer_module.find_ranks_file())


@pytest.fixture(scope="module")
def transformers_5() -> None:
    """What the script is run with; the model that it makes is for transformers 4 as well."""
    if transformers.__version__.startswith("4."):
        pytest.skip(f"transformers {transformers.__version__} makes no tokenizer of merges")


@pytest.fixture(scope="module")
def tokenizer(ranks: dict[bytes, int], transformers_5: None) -> Qwen2TokenizerFast:
    return tokenizer_module.build_tokenizer(ranks)


@pytest.fixture(scope="module")
def config(tokenizer: Qwen2TokenizerFast) -> Qwen2_5_VLConfig:
    return make_config(tokenizer)


@pytest.fixture(scope="module")
def examples(tokenizer: Qwen2TokenizerFast) -> Examples:
    """Three rows of noise in place of images: 4 x 4 patches, so 4 image tokens."""
    generator = torch.Generator().manual_seed(0)
    text = "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>Which?"
    answer_ids_10C, digit_position = encode_answers(make_processor(tokenizer))
    return Examples(
        prompt_ids_T=torch.tensor(tokenizer.encode(text)),
        answer_ids_10C=answer_ids_10C,
        digit_position=digit_position,
        pixels_NPD=torch.randn(3, 16, 3 * 2 * 14 * 14, generator=generator),
        grid_thw=torch.tensor([[1, 4, 4]]),
        digits_N=torch.tensor([7, 0, 3]),
    )


def test_final_merge_follows_the_ranks() -> None:
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"bc": 3, b"ab": 4, b"abc": 5}
    # Both a+bc and ab+c spell the token; "bc" has the lower rank and is merged first.
    assert tokenizer_module.final_merge(b"abc", ranks) == (b"a", b"bc")
    assert tokenizer_module.final_merge(b"ab", ranks) == (b"a", b"b")


@pytest.mark.parametrize(
    ("token", "token_id"),
    [
        ("<|endoftext|>", 151643),
        ("<|im_start|>", 151644),
        ("<|im_end|>", 151645),
        ("<|vision_start|>", 151652),
        ("<|vision_end|>", 151653),
        ("<|vision_pad|>", 151654),
        ("<|image_pad|>", 151655),
        ("<|video_pad|>", 151656),
        ("<tool_call>", 151657),
        ("<|file_sep|>", 151664),
    ],
)
def test_special_ids(tokenizer: Qwen2TokenizerFast, token: str, token_id: int) -> None:
    assert tokenizer.encode(token) == [token_id]


def test_tokenizer_passes_its_own_check(tokenizer: Qwen2TokenizerFast) -> None:
    tokenizer_module.check_tokenizer(tokenizer)
    assert len(tokenizer) == 151665
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (151645, 151643)
    assert tokenizer.decode([151645, 22], skip_special_tokens=True) == "7"


def test_ids_equal_those_of_the_rank_based_encoder(
    tokenizer: Qwen2TokenizerFast, ranks: dict[bytes, int]
) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    reference = tiktoken.Encoding("qwen", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    texts = [*tokenizer_module.PROBES, Path(__file__).read_text(encoding="utf-8")]
    for line in (line for text in texts for line in text.splitlines(keepends=True)):
        if "<|" not in line and "tool_call" not in line:
            assert tokenizer.encode(line) == reference.encode(line), line


def test_chat_template_with_two_images(tokenizer: Qwen2TokenizerFast) -> None:
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    assert prompt_text(make_processor(tokenizer), "<image>Here<image>and there.") == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{mark}Here{mark}and there.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_answers_differ_in_one_token(examples: Examples) -> None:
    assert examples.answer_ids_10C[7].tolist() == [27, 9217, 29, 22, 522, 9217, 29, 151645]
    assert examples.digit_position == 3
    assert examples.digit_ids_10.tolist() == list(range(15, 25))


def test_sizes_that_the_engines_need(config: Qwen2_5_VLConfig) -> None:
    text = config.text_config
    head_size = text.hidden_size // text.num_attention_heads
    assert head_size == 32
    assert 2 * sum(text.rope_parameters["mrope_section"]) == head_size
    assert text.num_key_value_heads % 2 == 0
    assert config.vision_config.out_hidden_size == text.hidden_size
    assert text.vocab_size == VOCAB_SIZE == 151936
    assert config.tie_word_embeddings
    assert (config.image_token_id, config.video_token_id) == (151655, 151656)


def test_weights_depend_on_the_seed_alone(config: Qwen2_5_VLConfig) -> None:
    first, again, other = (build_model(config, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[key], again[key]) for key in first)
    key = "model.visual.blocks.0.attn.qkv.weight"
    assert not torch.equal(first[key], other[key])


def test_compact_ids(examples: Examples) -> None:
    vocab = CompactVocab.of(examples)
    compact = vocab.encode_examples(examples)
    used = vocab.used_ids_U
    assert torch.equal(used[compact.prompt_ids_T], examples.prompt_ids_T)
    assert torch.equal(used[compact.answer_ids_10C], examples.answer_ids_10C)
    assert vocab.log_multiplicity[:-1].eq(0).all()
    num_unused = VOCAB_SIZE - len(used)
    assert vocab.log_multiplicity[-1].item() == pytest.approx(math.log(num_unused))
    with pytest.raises(AssertionError, match="outside the used ones"):
        vocab.encode(torch.tensor([5]))


def test_compact_model_has_the_whole_vocabularys_probabilities(
    config: Qwen2_5_VLConfig, examples: Examples
) -> None:
    vocab = CompactVocab.of(examples)
    model = build_model(config, seed=0)
    compact = shrink(model, vocab, seed=0)
    with torch.no_grad():
        compact.get_input_embeddings().weight[-1].normal_(std=0.1)
        expand(compact, model, vocab, seed=0)
        rows = torch.arange(len(examples))
        full_BCV = completion_log_probs(model, examples, rows)
        small_BCV = completion_log_probs(
            compact, vocab.encode_examples(examples), rows, vocab.log_multiplicity
        )
    torch.testing.assert_close(
        full_BCV[..., vocab.used_ids_U], small_BCV[..., :-1], atol=0.02, rtol=0
    )
    unused = model.get_input_embeddings().weight[[0, 1000, 151_900]]
    assert not torch.equal(unused[0], unused[1])
    assert unused.std(dim=0).max() < 0.05
    assert compact.config.text_config.vocab_size == vocab.size
    assert model.config.text_config.vocab_size == VOCAB_SIZE


def test_log_probs_split_into_form_and_digit(examples: Examples) -> None:
    compact = CompactVocab.of(examples).encode_examples(examples)
    num_ids = CompactVocab.of(examples).size
    generator = torch.Generator().manual_seed(0)
    shape = (3, compact.answer_ids_10C.shape[1], num_ids)
    log_probs_BCV = torch.randn(shape, generator=generator).log_softmax(dim=-1)
    form_B, digit_B10 = split_log_probs(log_probs_BCV, compact, compact.digits_N)
    torch.testing.assert_close(digit_B10.exp().sum(dim=-1), torch.ones(3))
    for row, digit in enumerate(compact.digits_N.tolist()):
        answer = compact.answer_ids_10C[digit]
        expected = sum(log_probs_BCV[row, i, token].item() for i, token in enumerate(answer))
        assert (form_B[row] + digit_B10[row, digit]).item() == pytest.approx(expected, abs=1e-4)


def test_loss_falls_when_the_answer_gets_likelier(examples: Examples) -> None:
    compact = CompactVocab.of(examples).encode_examples(examples)
    rows = torch.arange(3)
    logits = torch.zeros(3, compact.answer_ids_10C.shape[1], CompactVocab.of(examples).size)
    answers_BC1 = compact.answer_ids_10C[compact.digits_N][..., None]
    losses = [
        training_loss(
            logits.scatter(-1, answers_BC1, bonus).log_softmax(dim=-1), compact, rows
        ).item()
        for bonus in (0.0, 1.0, 2.0)
    ]
    assert losses == sorted(losses, reverse=True)
    # Uniform: ln 10 for the digit, ln V for the other seven tokens, ln(V / 10) for "some digit".
    num_ids = logits.shape[-1]
    expected = math.log(10) + 7 * math.log(num_ids) + math.log(num_ids / 10)
    assert losses[0] == pytest.approx(expected, abs=1e-4)


def test_random_weights_are_not_warm(config: Qwen2_5_VLConfig, examples: Examples) -> None:
    quality = measure(build_model(config, seed=0), examples)
    assert quality.form_rate < 1e-6
    assert 0 < quality.digit_entropy_nats <= math.log(10) + 1e-5
    assert not is_warm(quality)


@pytest.mark.parametrize(
    ("sampled_accuracy", "form_nats", "expected"),
    [(0.4, 0.001, True), (0.2, 0.001, False), (0.4, 0.1, False)],
)
def test_warm_needs_accuracy_and_form(
    sampled_accuracy: float, form_nats: float, expected: bool
) -> None:
    quality = Quality(
        greedy_accuracy=0.5,
        sampled_accuracy=sampled_accuracy,
        form_rate=1.0,
        form_nats=form_nats,
        digit_entropy_nats=1.5,
    )
    assert is_warm(quality) is expected


def test_batches_visit_each_row_once_per_round() -> None:
    iterator = batches(64, seed=0)
    first_round = torch.cat([next(iterator), next(iterator)])
    assert sorted(first_round.tolist()) == list(range(64))
    assert next(iterator).tolist() != first_round[:32].tolist()
    assert next(batches(64, seed=0)).tolist() == first_round[:32].tolist()


def test_one_thread_is_given_back() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


@pytest.mark.stack  # writes 80 MB
@pytest.mark.usefixtures("transformers_5")
def test_folder_with_random_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "model"
    arguments = ["--output", str(output), "--no-warm-start", "--seed", "5"]
    make_tiny_vlm.main(arguments)
    report = json.loads((output / make_tiny_vlm.REPORT).read_text())
    assert (report["seed"], report["num_parameters"]) == (5, 20_001_216)
    assert "heldout" not in report
    saved = json.loads((output / "config.json").read_text())
    assert saved["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    assert saved["dtype"] == "float32"
    tokenizer_module.check_tokenizer(AutoTokenizer.from_pretrained(output))
    capsys.readouterr()
    make_tiny_vlm.main(arguments)
    assert "nothing to do" in capsys.readouterr().out


def test_missing_digits_are_named(tmp_path: Path) -> None:
    output = str(tmp_path / "model")
    with pytest.raises(SystemExit, match=r"--data is missing.*--no-warm-start"):
        make_tiny_vlm.main(["--output", output])
    with pytest.raises(SystemExit, match=r"has no manifest\.json.*make_digits\.py --output"):
        make_tiny_vlm.main(["--output", output, "--data", str(tmp_path / "nowhere")])


def test_a_family_is_made_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the folder then holds, `tests/stack/test_families.py` loads."""
    monkeypatch.setattr(tokenizer_module, "read_ranks", lambda _: {})
    monkeypatch.setattr(families, "make_family", lambda family, *_: len(family.name))
    output = tmp_path / "model"
    arguments = ["--output", str(output), "--family", "gemma3"]
    make_tiny_vlm.main(arguments)
    argv = "--model_type gemma3_vision --template gemma3_vision"
    assert f"6 parameters, random weights ({argv})" in capsys.readouterr().out
    make_tiny_vlm.main(arguments)
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"--family gema3 is not known; expected one of qwen2_vl"):
        make_tiny_vlm.main(["--output", str(tmp_path / "other"), "--family", "gema3"])
    assert not (tmp_path / "other").exists()


def test_claim_builds_once_and_resumes_what_was_interrupted(tmp_path: Path) -> None:
    output = tmp_path / "made"
    assert claim(output, {"seed": 0}, force=False)
    assert read_manifest(output) == {"complete": False, "settings": {"seed": 0}}
    assert claim(output, {"seed": 0}, force=False)
    finish(output, {"seed": 0})
    assert not claim(output, {"seed": 0}, force=False)
    assert claim(output, {"seed": 0}, force=True)


def test_claim_refuses_other_settings_and_foreign_folders(tmp_path: Path) -> None:
    output = tmp_path / "made"
    claim(output, {"seed": 0}, force=False)
    with pytest.raises(ValueError, match=r"\{'seed': 0\}.*\{'seed': 1\}.*--force"):
        claim(output, {"seed": 1}, force=False)
    assert claim(output, {"seed": 1}, force=True)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "letter.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds files but no manifest\.json.*--force"):
        claim(foreign, {"seed": 0}, force=False)
    (foreign / "manifest.json").write_text("[1]")
    with pytest.raises(ValueError, match="not a manifest that this script wrote"):
        claim(foreign, {"seed": 0}, force=False)
