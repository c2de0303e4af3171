"""Every number of the training: shapes of the two models, batch sizes, learning rates, lengths."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The size of one Llama."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    context: int


@dataclass(frozen=True)
class TargetRecipe:
    """Next-token training of the target: many epochs over little text, hence the dropout and the strong decay."""

    num_epochs: float = 24.0
    batch_size: int = 48
    learning_rate: float = 4e-3
    weight_decay: float = 1.2
    dropout: float = 0.2


@dataclass(frozen=True)
class DraftRecipe:
    """Distillation of the drafter, half on the training text and half on text that the target wrote."""

    num_steps: int = 7000
    batch_size: int = 256
    learning_rate: float = 5e-3
    weight_decay: float = 0.02
    # How long the prompts are that the target continues; one pool of samples for each.
    prompt_lengths: tuple[int, ...] = (16, 64, 1, 128, 32, 192, 4, 96)
    samples_per_prompt_length: int = 2048
    max_total_variation_weight: float = 0.9


@dataclass(frozen=True)
class Recipe:
    """What one run of ``models.train`` does."""

    target_shape: Shape
    draft_shape: Shape
    target: TargetRecipe
    draft: DraftRecipe
    vocab_size: int = 4096
    seed: int = 20
    max_files: int | None = None
    log_every: int = 200


FULL = Recipe(
    target_shape=Shape(
        hidden_size=384,
        num_layers=6,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=832,
        context=2048,
    ),
    draft_shape=Shape(
        hidden_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=320,
        context=512,
    ),
    target=TargetRecipe(),
    draft=DraftRecipe(),
)

SMOKE = Recipe(
    target_shape=Shape(
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        intermediate_size=96,
        context=128,
    ),
    draft_shape=Shape(
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        intermediate_size=64,
        context=64,
    ),
    target=TargetRecipe(num_epochs=0.05, batch_size=8),
    draft=DraftRecipe(num_steps=20, batch_size=8, prompt_lengths=(1, 8), samples_per_prompt_length=16),
    vocab_size=512,
    max_files=60,
    log_every=10,
)
