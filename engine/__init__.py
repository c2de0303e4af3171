"""What drafter and verifier share: model, paged KV cache, scheduling, serving."""
