"""How good the pair is: perplexity of both models, and how often the target would accept the drafter's tokens.

``python -m models.evaluate`` measures the shipped pair on the shipped snippets and prints the numbers as JSON.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from models.corpus import load_snippets
from models.pair import load_model

DEMO = Path(__file__).parent / "demo"
_IGNORED = -100


@dataclass(frozen=True)
class PairMetrics:
    """Means over all predicted tokens; both models see the same context, cut to what the drafter can hold."""

    num_tokens: int
    target_perplexity: float
    draft_perplexity: float
    acceptance: float  # E[sum_x min(p(x), q(x))], temperature 1
    greedy_agreement: float  # how often argmax q = argmax p


@torch.inference_mode()
def evaluate_pair(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    documents: list[torch.Tensor],  # int64 [num_tokens] each
    *,
    context: int,
    batch_size: int = 16,
    num_skipped: int = 0,
) -> PairMetrics:
    """Measure on documents cut into windows of ``context`` tokens, without the first ``num_skipped`` predictions."""
    num_tokens = 0
    totals = torch.zeros(4, dtype=torch.float64)
    for input_ids, labels in padded_windows(documents, context=context, batch_size=batch_size, device=target.device):
        labels[:, :num_skipped] = _IGNORED
        counted = labels != _IGNORED
        p_log = target(input_ids).logits[counted].float().log_softmax(-1)
        q_log = draft(input_ids).logits[counted].float().log_softmax(-1)
        totals += torch.stack(
            [
                F.nll_loss(p_log, labels[counted], reduction="sum"),
                F.nll_loss(q_log, labels[counted], reduction="sum"),
                torch.minimum(p_log, q_log).exp().sum(),
                (p_log.argmax(-1) == q_log.argmax(-1)).sum(),
            ]
        ).cpu()
        num_tokens += int(counted.sum())
    target_loss, draft_loss, acceptance, greedy_agreement = (totals / num_tokens).tolist()
    return PairMetrics(num_tokens, math.exp(target_loss), math.exp(draft_loss), acceptance, greedy_agreement)


@torch.inference_mode()
def perplexity(
    model: LlamaForCausalLM,
    documents: list[torch.Tensor],  # int64 [num_tokens] each
    *,
    context: int,
    batch_size: int = 8,
) -> float:
    """Perplexity of one model on documents cut into windows of ``context`` tokens."""
    loss, num_tokens = 0.0, 0
    for input_ids, labels in padded_windows(documents, context=context, batch_size=batch_size, device=model.device):
        logits = model(input_ids).logits.float()
        loss += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED, reduction="sum"))
        num_tokens += int((labels != _IGNORED).sum())
    return math.exp(loss / num_tokens)


def padded_windows(
    documents: list[torch.Tensor],  # int64 [num_tokens] each
    *,
    context: int,
    batch_size: int,
    device: torch.device,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:  # int64 [batch, context] twice
    """Inputs and labels; the padding stands at the right, where a causal model cannot see it."""
    windows = [window for document in documents for window in torch.split(document, context) if len(window) > 1]
    for start in range(0, len(windows), batch_size):
        chunk = windows[start : start + batch_size]
        input_ids = torch.zeros(len(chunk), context, dtype=torch.int64)
        labels = torch.full((len(chunk), context), _IGNORED)
        for row, window in enumerate(chunk):
            input_ids[row, : len(window)] = window
            labels[row, : len(window) - 1] = window[1:]
        yield input_ids.to(device), labels.to(device)


def evaluate_snippets(folder: Path, *, device: torch.device, max_snippets: int | None = None) -> PairMetrics:
    """Measure the pair in ``folder`` on its own snippets, computing in float32."""
    target = load_model(folder / "target", dtype=torch.float32, device=device)
    draft = load_model(folder / "draft", dtype=torch.float32, device=device)
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    snippets = load_snippets(folder / "heldout" / "snippets.json")[:max_snippets]
    documents = [torch.tensor(tokenizer.encode(snippet.text).ids) for snippet in snippets]
    return evaluate_pair(target, draft, documents, context=draft.config.max_position_embeddings)


def main() -> None:
    """Print the metrics of a pair on its snippets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", type=Path, default=DEMO, help="folder with target, draft and heldout")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    args = parser.parse_args()
    print(json.dumps(asdict(evaluate_snippets(args.pair, device=args.device)), indent=2))


if __name__ == "__main__":
    main()
