"""A language model on one device: loading, fused modules, attention, the paged KV cache, CUDA graphs, steps."""
