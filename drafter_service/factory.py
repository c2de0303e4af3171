"""Makes the drafter that the settings ask for."""

from __future__ import annotations

from drafter_service.drafter import Drafter
from drafter_service.ngram_drafter import NgramDrafter
from drafter_service.scripted_drafter import ScriptedDrafter, load_script
from drafter_service.settings import DrafterSettings
from outrider.protocol.fingerprint import model_revision, tokenizer_digest
from outrider.protocol.wire import MIN_EXPANSIONS, NUM_EXPANSIONS

# Expansions of a pass: on a GPU, so many cost little more than one.
_NODES_ON_GPU = 256
_NODES_ON_CPU = 8
# Sequences whose keys are kept at once: on a CPU, their trees would take too much of the cache.
_MAX_SLOTS_ON_CPU = 64


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
    from drafter_service.executor import DraftExecutor, TreeOptions
    from drafter_service.model_drafter import ModelDrafter
    from engine.device import make_runner
    from engine.model_runner import ModelRunner

    path = settings.model
    assert path is not None

    is_on_gpu = has_gpu(settings)
    takes_turns = not is_on_gpu if settings.takes_turns is None else settings.takes_turns
    max_expansions = settings.max_expansions or (MIN_EXPANSIONS if takes_turns else NUM_EXPANSIONS)
    num_slots = settings.max_sequences if is_on_gpu else min(settings.max_sequences, _MAX_SLOTS_ON_CPU)

    def make_executor(runner: ModelRunner) -> DraftExecutor:
        options = TreeOptions(
            max_rows=min(num_slots, settings.graph_max_sequences),
            max_nodes=settings.pass_nodes or (_NODES_ON_GPU if is_on_gpu else _NODES_ON_CPU),
            num_passes=settings.replay_passes,
            max_draft_tokens=settings.graph_draft_tokens,
            # Taking turns, other outcomes than the first come too late.
            num_children=1 if takes_turns else settings.num_children,
            max_expansions=max_expansions,
            min_probability=settings.min_path_probability,
            num_candidates=settings.num_candidates,
        )
        return DraftExecutor(runner, num_slots=num_slots, options=options)

    tokenizer = tokenizer_digest(path)

    def make_masked_runner() -> ModelRunner:
        runner = make_runner(settings, path, num_reserved_slots=num_slots * max_expansions)
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
        num_slots=num_slots,
        takes_turns=takes_turns,
        has_graphs=settings.cuda_graphs,
    )
