"""Trees behind committed tokens in a poisoned paged cache, and what attention of their nodes should give."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.node_keys import NodeKeys, collect_node_keys


@dataclass(frozen=True)
class TreeCase:
    """Arguments of `tree_attention` and `collect_node_keys`."""

    query: torch.Tensor  # [batch * num_queries, num_heads, head_dim]
    key_cache: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], NaN in every slot that nobody sees
    value_cache: torch.Tensor  # as key_cache
    prefix_lens: torch.Tensor  # [batch] int32
    block_tables: torch.Tensor  # [batch, max_blocks] int32, a block full of NaN beyond a sequence's own
    node_starts: torch.Tensor  # [batch] int64, areas in no order
    is_ancestor: torch.Tensor  # [batch, num_queries, area_size] bool
    node_positions: torch.Tensor  # [batch, area_size] int64, nonsense where nobody's ancestor is
    positions: torch.Tensor  # [batch * num_queries] int64

    def node_keys(self, *, has_positions: bool = True) -> NodeKeys:
        return collect_node_keys(self.is_ancestor, self.node_starts, self.node_positions if has_positions else None)

    def arguments(self, *, has_positions: bool = True) -> tuple[object, ...]:
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.prefix_lens,
            self.block_tables,
            self.node_keys(has_positions=has_positions),
            self.positions,
        )


def make_tree_case(
    sequences: list[tuple[int, int]],  # (committed tokens, nodes computed) of each; the nodes at most num_queries
    num_queries: int,
    *,
    num_older: int = 20,  # nodes of each sequence that were computed before
    area_size: int = 70,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> TreeCase:
    """Random trees with nodes anywhere in their areas; queries beyond a sequence's nodes see the prefix alone."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    batch = len(sequences)
    num_used = [-(-prefix_len // block_size) for prefix_len, _ in sequences]
    num_blocks = sum(num_used) + 1
    num_area_blocks = -(-batch * area_size // block_size)
    nobody, *shuffled = torch.randperm(num_blocks, generator=generator).tolist()
    key_cache = torch.full((num_blocks + num_area_blocks, block_size, num_kv_heads, head_dim), float("nan")).to(dtype)
    value_cache = key_cache.clone()
    areas = torch.randperm(batch, generator=generator)
    case = TreeCase(
        query=random(batch * num_queries, num_heads, head_dim),
        key_cache=key_cache,
        value_cache=value_cache,
        prefix_lens=torch.tensor([prefix_len for prefix_len, _ in sequences], dtype=torch.int32),
        block_tables=torch.full((batch, max(num_used) + 2), nobody, dtype=torch.int32),
        node_starts=num_blocks * block_size + areas * area_size,
        is_ancestor=torch.zeros(batch, num_queries, area_size, dtype=torch.bool),
        node_positions=torch.randint(1000, (batch, area_size), generator=generator),
        positions=torch.zeros(batch * num_queries, dtype=torch.int64),
    )
    for sequence, (prefix_len, num_new) in enumerate(sequences):
        blocks = [shuffled.pop() for _ in range(num_used[sequence])]
        case.block_tables[sequence, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        slots = [blocks[position // block_size] * block_size + position % block_size for position in range(prefix_len)]
        places = torch.randperm(area_size, generator=generator)[: num_older + num_new].tolist()
        ancestors: list[list[int]] = []  # of each node, its places
        for place in places:
            # Now and then another root, and deep rather than wide.
            parent = -1 if below(8) == 0 else max(0, len(ancestors) - 1 - below(3))
            ancestors.append([*(ancestors[parent] if ancestors and parent >= 0 else []), place])
        case.positions[sequence * num_queries : (sequence + 1) * num_queries] = prefix_len
        for query, path in enumerate(ancestors[num_older:]):
            case.is_ancestor[sequence, query, path] = True
            case.positions[sequence * num_queries + query] = prefix_len + len(path) - 1
            case.node_positions[sequence, path] = prefix_len + torch.arange(len(path))
        seen = case.is_ancestor[sequence].any(dim=0).nonzero().flatten()
        slots += (case.node_starts[sequence] + seen).tolist()
        key_cache.flatten(0, 1)[slots] = random(len(slots), num_kv_heads, head_dim)
        value_cache.flatten(0, 1)[slots] = random(len(slots), num_kv_heads, head_dim)
    return TreeCase(**{name: tensor.to(device) for name, tensor in vars(case).items()})


def dense_tree_attention(
    case: TreeCase,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cuts_nodes: bool = True,  # a window does
) -> torch.Tensor:  # [batch * num_queries, num_heads, head_dim] float64 on the CPU, NaN for what sees nothing
    """Attention straight from its definition, query by query in float64."""
    case = TreeCase(**{name: tensor.cpu() for name, tensor in vars(case).items()})
    query = case.query.double()
    block_size, num_kv_heads = case.key_cache.shape[1:3]
    num_queries = case.is_ancestor.shape[1]
    keys, values = (
        cache.flatten(0, 1).double().repeat_interleave(query.shape[1] // num_kv_heads, dim=1)
        for cache in (case.key_cache, case.value_cache)
    )
    output = torch.full_like(query, float("nan"))
    for token in range(query.shape[0]):
        sequence, index = divmod(token, num_queries)
        last, first = int(case.positions[token]), 0
        if sliding_window is not None:
            first = last - sliding_window + 1
        slots = [
            int(case.block_tables[sequence, position // block_size]) * block_size + position % block_size
            for position in range(max(0, first), int(case.prefix_lens[sequence]))
        ]
        for place in case.is_ancestor[sequence, index].nonzero().flatten().tolist():
            if not cuts_nodes or int(case.node_positions[sequence, place]) >= first:
                slots.append(int(case.node_starts[sequence]) + place)
        if slots:
            scores = torch.einsum("hd,khd->hk", query[token], keys[slots]) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            output[token] = torch.einsum("hk,khd->hd", scores.softmax(dim=1), values[slots])
    return output
