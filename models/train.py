"""Train the demo pair from the source of Python's standard library.

``python -m models.train --output models/demo`` does all of it: reads the files, trains the tokenizer, the target and
the drafter, and writes the models, the held-out snippets and the metrics. It wants a GPU; ``--smoke`` runs every step
in miniature on a CPU.
"""

import argparse
import json
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from models import corpus as corpora
from models.corpus import Corpus
from models.evaluate import evaluate_pair, perplexity
from models.pair import build_model, load_model, num_parameters, sample_continuations, save_model
from models.recipe import FULL, SMOKE, Recipe

P = ParamSpec("P")
R = TypeVar("R")

# Shares of the time budget at whose ends the target, the samples and the drafter are finished.
_TARGET_SHARE, _SAMPLES_SHARE, _DRAFT_SHARE = 0.50, 0.62, 0.92
_NUM_EVALUATION_SAMPLES = 128


@dataclass(frozen=True)
class Runtime:
    """Where the training runs and until when."""

    device: torch.device
    is_compiled: bool
    started: float
    seconds: float

    def until(self, share: float) -> float:
        """The moment (``time.monotonic``) at which this share of the time budget is spent."""
        return self.started + share * self.seconds

    def autocast(self) -> torch.autocast:
        """Matrix products in bfloat16 on a GPU, everything as it is on a CPU."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")

    def compile(self, function: Callable[P, R]) -> Callable[P, R]:
        """``torch.compile`` where it was asked for."""
        return torch.compile(function, dynamic=False) if self.is_compiled else function


@dataclass(frozen=True)
class TrainingLog:
    """What one of the two trainings did."""

    num_parameters: int
    num_steps: int
    num_tokens: int
    seconds: float


class Optimizer:
    """Muon for the matrices inside the blocks, AdamW for embeddings and norms, one schedule for both."""

    def __init__(self, model: LlamaForCausalLM, *, learning_rate: float, weight_decay: float) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
        embeddings = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." not in name]
        norms = [p for p in model.parameters() if p.ndim == 1]
        self._model = model
        self._learning_rate = learning_rate
        self._optimizers: list[torch.optim.Optimizer] = [
            # This scaling of Muon's update lets both optimizers share one learning rate.
            torch.optim.Muon(matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(
                [{"params": embeddings, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}],
                betas=(0.9, 0.95),
                fused=model.device.type == "cuda",
            ),
        ]

    def step(self, progress: float) -> None:
        """One update at this progress (0 to 1): a short warm-up, then straight down to zero."""
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._learning_rate * min(progress / 0.02, 1.0) * (1.0 - progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def progress_steps(num_steps: int, deadline: float) -> Iterator[tuple[int, float]]:
    """Steps with their progress from 0 to 1; where time runs out first, progress follows the clock instead."""
    started = time.monotonic()
    for step in range(num_steps):
        elapsed_share = (time.monotonic() - started) / max(deadline - started, 1e-6)
        if elapsed_share >= 1.0:
            return
        yield step, max((step + 0.5) / num_steps, elapsed_share)


def train_target(corpus: Corpus, recipe: Recipe, runtime: Runtime) -> tuple[LlamaForCausalLM, TrainingLog]:
    """Next-token training on windows of the target's whole context."""
    settings, context = recipe.target, recipe.target_shape.context
    model = build_model(recipe.target_shape, vocab_size=recipe.vocab_size, dropout=settings.dropout)
    model.to(runtime.device).train()  # type: ignore[arg-type]
    optimizer = Optimizer(model, learning_rate=settings.learning_rate, weight_decay=settings.weight_decay)

    def loss_of(windows: torch.Tensor) -> torch.Tensor:  # int64 [batch, context + 1] -> []
        logits = model(windows[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    compiled_loss = runtime.compile(loss_of)
    documents = [document.to(runtime.device) for document in corpus.train_documents]
    generator = torch.Generator().manual_seed(recipe.seed)
    data = corpora.batches(lambda: corpora.epoch_windows(documents, context + 1, generator), settings.batch_size)
    tokens_per_step = settings.batch_size * context
    num_train_tokens = sum(len(document) for document in documents)
    num_steps = max(int(settings.num_epochs * num_train_tokens / tokens_per_step), 2)

    started = time.monotonic()
    for step, progress in progress_steps(num_steps, runtime.until(_TARGET_SHARE)):
        with runtime.autocast():
            loss = compiled_loss(next(data))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(progress)
        if step % recipe.log_every == 0:
            report("target", step, num_steps, tokens_per_step, started, f"loss {loss.item():.4f}")
        if step % (10 * recipe.log_every) == 0:
            # A separate eager forward: the compiled one keeps dropout in.
            model.train(False)
            with runtime.autocast():
                value = perplexity(model, corpus.held_out_documents, context=context)
            model.train()
            print(f"target step {step}: held-out perplexity {value:.3f}", flush=True)
    log = TrainingLog(num_parameters(model), step + 1, (step + 1) * tokens_per_step, time.monotonic() - started)
    return model, log


def sample_pool(
    target: LlamaForCausalLM, corpus: Corpus, recipe: Recipe, runtime: Runtime
) -> torch.Tensor:  # int64 [num_samples, draft context]
    """Text that the target writes behind short prompts from the training text: what a drafter meets in service."""
    settings, context = recipe.draft, recipe.draft_shape.context
    host_generator = torch.Generator().manual_seed(recipe.seed + 1)
    generator = torch.Generator(runtime.device).manual_seed(recipe.seed + 1)
    pools: list[torch.Tensor] = []
    for prompt_length in settings.prompt_lengths:
        if pools and time.monotonic() > runtime.until(_SAMPLES_SHARE):
            break
        windows = corpora.epoch_windows(corpus.train_documents, context, host_generator)
        prompts = windows[: settings.samples_per_prompt_length, :prompt_length].to(runtime.device)
        pools.append(sample_continuations(target, prompts, context - prompt_length, generator))
        elapsed = time.monotonic() - runtime.started
        print(f"samples: {len(pools[-1])} behind {prompt_length} tokens, {elapsed:.0f} s in all", flush=True)
    return torch.cat(pools)


def distillation_loss(
    p_logits: torch.Tensor,  # [batch, num_tokens, vocab]
    q_logits: torch.Tensor,  # [batch, num_tokens, vocab]
    total_variation_weight: torch.Tensor,  # []
) -> torch.Tensor:  # []
    """KL(p || q) mixed with the total variation distance, which is exactly one minus the acceptance."""
    p_log = p_logits.float().log_softmax(-1)
    q_log = q_logits.float().log_softmax(-1)
    p, q = p_log.exp(), q_log.exp()
    divergence = (p * (p_log - q_log)).sum(-1).mean()
    total_variation = 0.5 * (p - q).abs().sum(-1).mean()
    return torch.lerp(divergence, total_variation, total_variation_weight)


def distill_draft(
    target: LlamaForCausalLM, samples: torch.Tensor, corpus: Corpus, recipe: Recipe, runtime: Runtime
) -> tuple[LlamaForCausalLM, TrainingLog]:
    """Teach the drafter the target's distributions, first by KL, more and more by what acceptance counts."""
    settings, context = recipe.draft, recipe.draft_shape.context
    model = build_model(recipe.draft_shape, vocab_size=recipe.vocab_size)
    model.to(runtime.device).train()  # type: ignore[arg-type]
    optimizer = Optimizer(model, learning_rate=settings.learning_rate, weight_decay=settings.weight_decay)

    def target_logits(input_ids: torch.Tensor) -> torch.Tensor:  # int64 [batch, context] -> [batch, context, vocab]
        logits: torch.Tensor = target(input_ids, use_cache=False).logits
        return logits

    def loss_of(input_ids: torch.Tensor, p_logits: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return distillation_loss(p_logits, model(input_ids, use_cache=False).logits, weight)

    compiled_logits, compiled_loss = runtime.compile(target_logits), runtime.compile(loss_of)
    documents = [document.to(runtime.device) for document in corpus.train_documents]
    generator = torch.Generator().manual_seed(recipe.seed + 2)
    half = settings.batch_size // 2
    read = corpora.batches(lambda: corpora.epoch_windows(documents, context, generator), half)
    written = corpora.batches(lambda: samples[torch.randperm(len(samples), generator=generator)], half)
    tokens_per_step = settings.batch_size * context

    started = time.monotonic()
    for step, progress in progress_steps(settings.num_steps, runtime.until(_DRAFT_SHARE)):
        input_ids = torch.cat([next(read), next(written)])
        weight = torch.tensor(settings.max_total_variation_weight * progress, device=runtime.device)
        with torch.no_grad():
            p_logits = compiled_logits(input_ids)
        with runtime.autocast():
            loss = compiled_loss(input_ids, p_logits, weight)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(progress)
        if step % recipe.log_every == 0:
            report("draft", step, settings.num_steps, tokens_per_step, started, f"loss {loss.item():.4f}")
        if step % (10 * recipe.log_every) == 0:
            with runtime.autocast():
                metrics = evaluate_pair(target, model, corpus.held_out_documents, context=context)
            print(f"draft step {step}: held-out {metrics}", flush=True)
    log = TrainingLog(num_parameters(model), step + 1, (step + 1) * tokens_per_step, time.monotonic() - started)
    return model.train(False), log


def report(name: str, step: int, num_steps: int, tokens_per_step: int, started: float, message: str) -> None:
    """One line of progress."""
    elapsed = time.monotonic() - started
    speed = step * tokens_per_step / elapsed / 1e6
    print(f"{name} step {step}/{num_steps}: {message}, {elapsed:.0f} s, {speed:.2f} M tokens/s", flush=True)


def write_metrics(
    output: Path,
    corpus: Corpus,
    snippets: list[corpora.Snippet],
    recipe: Recipe,
    runtime: Runtime,
    logs: dict[str, TrainingLog],
) -> None:
    """Measure the pair as written to disk, in float32, and write ``metrics.json``."""
    target = load_model(output / "target", dtype=torch.float32, device=runtime.device)
    draft = load_model(output / "draft", dtype=torch.float32, device=runtime.device)
    context = recipe.draft_shape.context
    encoded_snippets = [torch.tensor(corpus.tokenizer.encode(snippet.text).ids) for snippet in snippets]
    prompt_length = context // 8
    windows = corpora.epoch_windows(corpus.held_out_documents, context, torch.Generator().manual_seed(recipe.seed + 3))
    prompts = windows[:_NUM_EVALUATION_SAMPLES, :prompt_length].to(runtime.device)
    generator = torch.Generator(runtime.device).manual_seed(recipe.seed + 3)
    written = sample_continuations(target, prompts, context - prompt_length, generator).cpu()
    metrics = {
        "held_out_files": {
            "num_files": len(corpus.held_out_files),
            "target_perplexity_at_full_context": perplexity(
                target, corpus.held_out_documents, context=recipe.target_shape.context
            ),
            **asdict(evaluate_pair(target, draft, corpus.held_out_documents, context=context)),
        },
        "held_out_snippets": {
            "num_snippets": len(snippets),
            **asdict(evaluate_pair(target, draft, encoded_snippets, context=context)),
        },
        "target_samples": {
            "num_samples": len(written),
            **asdict(evaluate_pair(target, draft, list(written), context=context, num_skipped=prompt_length - 1)),
        },
        "training": {
            "environment": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if runtime.device.type == "cuda" else "CPU",
            },
            "num_files": len(corpus.train_files),
            "num_tokens": sum(len(document) for document in corpus.train_documents),
            "num_characters": sum(len(file.text) for file in corpus.train_files),
            **{name: asdict(log) for name, log in logs.items()},
            "recipe": asdict(recipe),
        },
    }
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(json.dumps(metrics, indent=2), flush=True)


def train_pair(source: Path, output: Path, recipe: Recipe, runtime: Runtime) -> None:
    """The whole way from source files to ``output``."""
    torch.manual_seed(recipe.seed)
    corpus = corpora.build_corpus(source, vocab_size=recipe.vocab_size, max_files=recipe.max_files)
    snippets = corpora.cut_snippets(corpus, seed=recipe.seed)
    (output / "heldout").mkdir(parents=True, exist_ok=True)
    corpora.save_snippets(snippets, output / "heldout" / "snippets.json")
    if (source / "LICENSE.txt").exists():
        shutil.copy(source / "LICENSE.txt", output / "heldout" / "LICENSE.txt")
    print(
        f"corpus: {len(corpus.train_files)} files to train on, {len(corpus.held_out_files)} held out, "
        f"{sum(map(len, corpus.train_documents))} tokens, {len(snippets)} snippets, "
        f"{time.monotonic() - runtime.started:.0f} s in all",
        flush=True,
    )

    model, target_log = train_target(corpus, recipe, runtime)
    save_model(model, corpus.tokenizer, output / "target")
    # The drafter learns from the target as it is served: rounded to bfloat16.
    dtype = torch.bfloat16 if runtime.device.type == "cuda" else torch.float32
    target = load_model(output / "target", dtype=dtype, device=runtime.device)
    samples = sample_pool(target, corpus, recipe, runtime)
    draft, draft_log = distill_draft(target, samples, corpus, recipe, runtime)
    save_model(draft, corpus.tokenizer, output / "draft")
    write_metrics(output, corpus, snippets, recipe, runtime, {"target": target_log, "draft": draft_log})
    print(f"done in {time.monotonic() - runtime.started:.0f} s", flush=True)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the pair to")
    parser.add_argument("--source", type=Path, default=corpora.default_source(), help="folder with Python files")
    parser.add_argument("--minutes", type=float, default=60.0, help="time budget; schedules shorten to fit into it")
    parser.add_argument("--smoke", action="store_true", help="every step in miniature")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not args.smoke else "cpu")
    runtime = Runtime(
        device=device,
        is_compiled=device.type == "cuda" and not args.no_compile,
        started=time.monotonic(),
        seconds=60.0 * args.minutes,
    )
    train_pair(args.source, args.output, SMOKE if args.smoke else FULL, runtime)


if __name__ == "__main__":
    main()
