"""Makes the drafter that the settings ask for."""

from __future__ import annotations

from drafter_service.drafter import Drafter
from drafter_service.ngram_drafter import NgramDrafter
from drafter_service.scripted_drafter import ScriptedDrafter, load_script
from drafter_service.settings import DrafterSettings
from outrider.protocol.fingerprint import model_revision, tokenizer_digest


def has_gpu(settings: DrafterSettings) -> bool:
    """Whether the drafter will run on one. Raises ValueError for a device that is not there."""
    if settings.kind != "model":
        return False
    from engine.device import resolve_device

    return resolve_device(settings.device).type == "cuda"


def make_drafter(settings: DrafterSettings) -> Drafter:
    """The drafter, not yet loaded. Raises ValueError for a script that cannot be used."""
    if settings.kind == "ngram":
        return NgramDrafter(min_ngram=settings.min_ngram, max_ngram=settings.max_ngram)
    if settings.kind == "scripted":
        return ScriptedDrafter(load_script(settings.script))
    # Torch is loaded only where there is a model: the other drafters start in a moment.
    from drafter_service.executor import DraftExecutor
    from drafter_service.model_drafter import ModelDrafter
    from engine.device import make_runner
    from engine.model_runner import ModelRunner

    path = settings.model
    assert path is not None

    def make_executor(runner: ModelRunner) -> DraftExecutor:
        return DraftExecutor(
            runner,
            num_slots=settings.max_sequences,
            max_graph_rows=min(settings.max_sequences, settings.graph_max_sequences),
            max_draft_tokens=settings.graph_draft_tokens,
            num_candidates=settings.num_candidates,
        )

    tokenizer = tokenizer_digest(path)

    def make_masked_runner() -> ModelRunner:
        runner = make_runner(settings, path)
        if tokenizer.num_token_ids:
            # A target may have fewer rows of padding, or others: what is padding is never proposed.
            runner.mask_ids_from(tokenizer.num_token_ids)
        return runner

    return ModelDrafter(
        make_masked_runner,
        make_executor,
        name=path.name,
        revision=model_revision(path),
        tokenizer=tokenizer,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_sequences=settings.max_sequences,
        has_graphs=settings.cuda_graphs,
    )
