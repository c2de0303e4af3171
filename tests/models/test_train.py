"""The training script: its parts, and the whole of it in miniature."""

import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from models import corpus as corpora
from models.corpus import Corpus, SourceFile
from models.evaluate import evaluate_pair, perplexity
from models.pair import build_model, num_parameters, sample_continuations
from models.recipe import FULL, SMOKE
from models.train import distillation_loss, progress_steps

REPOSITORY = Path(__file__).parents[2]
VOCAB_SIZE = 300
TRAIN_TEXT = "".join(f"def function_{i}(x):\n    y = x + {i}\n    return y\n\n\n" for i in range(40))
HELD_OUT_TEXT = "".join(f"class Thing{i}:\n    size = {i}\n    weight = {i}.5\n    name = 'n'\n\n\n" for i in range(40))
# A copy of the training text in a held-out file: no snippet may come out of this stretch.
LEAKY_TEXT = HELD_OUT_TEXT + TRAIN_TEXT


def small_models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    torch.manual_seed(0)
    target = build_model(SMOKE.target_shape, vocab_size=VOCAB_SIZE)
    draft = build_model(SMOKE.draft_shape, vocab_size=VOCAB_SIZE)
    return target.train(False), draft.train(False)


def make_corpus(train_text: str, held_out_text: str) -> Corpus:
    tokenizer = corpora.train_tokenizer([train_text], vocab_size=VOCAB_SIZE)
    return Corpus(
        tokenizer=tokenizer,
        train_files=[SourceFile("train.py", train_text)],
        held_out_files=[SourceFile(f"held_out_{i}.py", held_out_text + f"# {i}\n") for i in range(8)],
        train_documents=[corpora.encode_document(tokenizer, train_text)],
        held_out_documents=[corpora.encode_document(tokenizer, held_out_text)],
    )


def test_whole_run_in_miniature(tmp_path: Path) -> None:
    """One command leaves two loadable models, snippets out of held-out files and the metrics of what it wrote."""
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "models.train", "--smoke", "--output", str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        timeout=240,
    )
    print(f"{time.monotonic() - started:.1f} s")

    for name, shape in (("target", SMOKE.target_shape), ("draft", SMOKE.draft_shape)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.dtype == torch.bfloat16
        assert model.config.max_position_embeddings == shape.context
        assert model.config.num_key_value_heads == shape.num_kv_heads
    tokenizer_file = (tmp_path / "target" / "tokenizer.json").read_bytes()
    assert tokenizer_file == (tmp_path / "draft" / "tokenizer.json").read_bytes()
    assert Tokenizer.from_buffer(tokenizer_file).get_vocab_size() == SMOKE.vocab_size
    snippets = corpora.load_snippets(tmp_path / "heldout" / "snippets.json")
    assert snippets
    assert all(SourceFile(snippet.path, snippet.text).is_held_out for snippet in snippets)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    # An untrained model stands at the vocabulary size; so short a training is enough to be far below it.
    assert metrics["held_out_files"]["target_perplexity"] < 0.6 * SMOKE.vocab_size
    assert 0.0 < metrics["held_out_files"]["acceptance"] < 1.0


def test_files_are_chosen_and_split_by_path_alone(tmp_path: Path) -> None:
    """Foreign packages, build output, broken and repeated files stay out; the split does not see the text."""
    wanted = [f"package/module_{i}.py" for i in range(200)]
    for number, path in enumerate(wanted):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(f"x = {number}\n")
    unwanted = {
        "site-packages/other.py": b"y = 1\n",
        "encodings/cp037.py": b"y = 2\n",
        "_sysconfigdata__linux.py": b"y = 3\n",
        "config-3.11-linux/tool.py": b"y = 4\n",
        "latin.py": b"y = '\xe9'\n",
        "crlf.py": b"y = 5\r\n",
        "empty.py": b"\n",
        "zz_copy.py": b"x = 7\n",
    }
    for path, content in unwanted.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    files = list(corpora.read_files(tmp_path))
    assert {file.path for file in files} == set(wanted)
    held_out = {file.path for file in files if file.is_held_out}
    assert 0 < len(held_out) < 30
    assert held_out == {path for path in wanted if SourceFile(path, "another text").is_held_out}


def test_tokenizer_reproduces_every_text() -> None:
    tokenizer = corpora.train_tokenizer([TRAIN_TEXT], vocab_size=VOCAB_SIZE)
    texts = [
        " leading",
        "\ttab\r\n",
        "naïve e\u0301 ﬁ",
        "漢字かな交じり文",
        "🙂🏽👩‍👩‍👧",
        "\x00\x7f",
        "".join(map(chr, range(0x250))),
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokenizer_of_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="too small for 4096 tokens"):
        corpora.train_tokenizer(["x = 1\n"], vocab_size=4096)


def test_an_epoch_holds_every_document_once() -> None:
    """Catches windows that overlap, repeat or skip: the tokens of an epoch are distinct, in order, and nearly all."""
    documents = list(torch.split(torch.arange(1000), 111))
    windows = corpora.epoch_windows(documents, 7, torch.Generator().manual_seed(0))
    tokens = windows.flatten()
    assert len(set(tokens.tolist())) == len(tokens) > 1000 - 2 * 7
    steps = (windows[:, 1:] - windows[:, :-1]).flatten()
    assert (steps == 1).float().mean() > 0.97
    other = corpora.epoch_windows(documents, 7, torch.Generator().manual_seed(1))
    assert not torch.equal(windows[: len(other)], other[: len(windows)])


def test_batches_go_on_for_ever_and_refuse_too_little_data() -> None:
    epochs = iter([torch.zeros(5, 3), torch.ones(5, 3)])
    first = list(itertools.islice(corpora.batches(lambda: next(epochs), 2), 4))
    assert [float(batch.mean()) for batch in first] == [0.0, 0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="5 windows do not fill a batch of 6"):
        next(corpora.batches(lambda: torch.zeros(5, 3), 6))


def test_snippets_do_not_leak_training_text() -> None:
    """A held-out file that repeats training text gives snippets from its own part only."""
    corpus = make_corpus(TRAIN_TEXT, LEAKY_TEXT)
    snippets = corpora.cut_snippets(corpus, seed=0)
    assert len(snippets) > 4
    for snippet in snippets:
        assert snippet.text not in TRAIN_TEXT
        assert set(corpora.line_runs(snippet.text)).isdisjoint(corpora.line_runs(TRAIN_TEXT))
        assert len(corpus.tokenizer.encode(snippet.text).ids) == snippet.num_tokens
        assert snippet.text.endswith("\n")
    assert snippets == corpora.cut_snippets(corpus, seed=0)


def test_snippets_survive_the_file(tmp_path: Path) -> None:
    snippets = corpora.cut_snippets(make_corpus(TRAIN_TEXT, HELD_OUT_TEXT + "# 漢字 🙂\n" * 40), seed=0)
    corpora.save_snippets(snippets, tmp_path / "snippets.json")
    assert corpora.load_snippets(tmp_path / "snippets.json") == snippets


def test_distillation_loss_is_what_its_names_say() -> None:
    torch.manual_seed(0)
    p_logits, q_logits = torch.randn(3, 5, 16), torch.randn(3, 5, 16)
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    divergence = (p * (p / q).log()).sum(-1).mean()
    rejected = 1.0 - torch.minimum(p, q).sum(-1).mean()
    torch.testing.assert_close(distillation_loss(p_logits, q_logits, torch.tensor(0.0)), divergence)
    torch.testing.assert_close(distillation_loss(p_logits, q_logits, torch.tensor(1.0)), rejected)
    torch.testing.assert_close(
        distillation_loss(p_logits, q_logits, torch.tensor(0.25)), 0.75 * divergence + 0.25 * rejected
    )


def test_progress_runs_to_the_end_of_the_steps_or_of_the_time() -> None:
    steps = list(progress_steps(10, time.monotonic() + 1000.0))
    assert [step for step, _ in steps] == list(range(10))
    assert steps[-1][1] == pytest.approx(0.95)

    reached = 0.0
    for _, progress in progress_steps(10**9, time.monotonic() + 0.2):
        assert reached <= progress < 1.0
        reached = progress
        time.sleep(0.005)
    assert reached > 0.9


@torch.no_grad()
def test_metrics_of_a_pair_against_plain_sums() -> None:
    """Windows, padding and skipping change nothing: the same numbers token by token, without any batching."""
    target, draft = small_models()
    documents = [torch.randint(VOCAB_SIZE, (length,)) for length in (2, 63, 64, 65, 150)]
    context, num_skipped = 64, 3
    losses: list[float] = []
    overlaps: list[float] = []
    agreements: list[bool] = []
    for document in documents:
        for window in torch.split(document, context):
            p = target(window[None]).logits[0].softmax(-1)
            q = draft(window[None]).logits[0].softmax(-1)
            for position in range(num_skipped, len(window) - 1):
                losses.append(-math.log(float(p[position, window[position + 1]])))
                overlaps.append(float(torch.minimum(p[position], q[position]).sum()))
                agreements.append(int(p[position].argmax()) == int(q[position].argmax()))
    metrics = evaluate_pair(target, draft, documents, context=context, batch_size=2, num_skipped=num_skipped)
    assert metrics.num_tokens == len(losses)
    assert metrics.target_perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert metrics.acceptance == pytest.approx(sum(overlaps) / len(overlaps), rel=1e-4)
    assert metrics.greedy_agreement == pytest.approx(sum(agreements) / len(agreements))

    itself = evaluate_pair(target, target, documents, context=context)
    assert itself.acceptance == pytest.approx(1.0, abs=1e-5)
    assert itself.greedy_agreement == 1.0
    assert perplexity(target, documents, context=context) == pytest.approx(itself.target_perplexity, rel=1e-5)


def test_samples_follow_the_model() -> None:
    """Catches a cache that loses positions: the sampled tokens are likely under a forward pass without a cache."""
    target, _ = small_models()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim == 2:
                parameter.mul_(15.0)  # sharp enough that a wrong context is caught
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCAB_SIZE, (64, 5), generator=generator)
    samples = sample_continuations(target, prompts, 20, generator)
    assert samples.shape == (64, 25)
    assert torch.equal(samples[:, :5], prompts)
    with torch.no_grad():
        log_p = target(samples).logits[:, 4:-1].log_softmax(-1)
    surprise = -log_p.gather(-1, samples[:, 5:, None]).mean()
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    assert float(entropy) < 0.8 * math.log(VOCAB_SIZE)
    assert float(surprise) == pytest.approx(float(entropy), rel=0.08)


def test_full_recipe_has_the_promised_shapes() -> None:
    target = build_model(FULL.target_shape, vocab_size=FULL.vocab_size)
    draft = build_model(FULL.draft_shape, vocab_size=FULL.vocab_size)
    assert 9_000_000 <= num_parameters(target) <= 10_000_000
    assert 900_000 <= num_parameters(draft) <= 1_100_000


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    model = build_model(SMOKE.target_shape, vocab_size=VOCAB_SIZE, dropout=0.5)
    input_ids = torch.arange(20)[None]
    model.train()
    assert not torch.equal(model(input_ids).logits, model(input_ids).logits)
    model.train(False)
    assert torch.equal(model(input_ids).logits, model(input_ids).logits)
