"""What the numbers are held against: the goals of one GPU a service, and others' engines on the same work.

Shape 8b, bfloat16, one H200 (a service each for two), measured on 2026-11-20. Keys are batch sizes.
"""

TARGET_STEP_MS = {1: 4.6, 8: 5.0, 32: 6.2, 64: 10.0}  # 5 positions a sequence, forward only
DRAFTER_LOOP_MS = {1: 3.3, 64: 4.0}  # K = 4, sampling included
SAMPLING_MS = {1: 0.012, 32: 0.05, 64: 0.10, 256: 0.20}  # K = 4; the last one for rejection alone
FILTERED_SAMPLING_MS = {1: 0.034, 32: 0.079, 64: 0.13, 256: 0.42}  # top-k and top-p: what it took before TARGET noise
HOST_MS = {64: 0.4}  # the host's work between two target steps, gRPC's left out
LOADING_SECONDS = 30.0  # "well under"
PLAIN_TOKENS_PER_SECOND = {1: 212.0, 8: 1_640.0, 32: 5_900.0, 64: 10_500.0}
SPECULATIVE_TOKENS_PER_SECOND = {1: 410.0, 8: 2_930.0, 32: 9_600.0, 64: 14_200.0}  # K = 4, temperature 1

# vLLM 0.25.1, temperature 1, one GPU: without speculation, and draft_model with K = 4 (acceptance length 3.45).
VLLM_PLAIN_TOKENS_PER_SECOND = {1: 202.0, 8: 1_554.0, 32: 5_450.0, 64: 9_379.0}
VLLM_SPECULATIVE_TOKENS_PER_SECOND = {1: 313.0, 8: 2_252.0, 32: 6_401.0, 64: 9_456.0}
# Its softmax and rejection sampling, K = 4.
VLLM_SAMPLING_MS = {1: 0.15, 32: 0.27, 64: 0.41, 256: 1.50}
