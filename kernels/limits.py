"""Limits that the kernels, the services and the wire share. Imports nothing."""

# Most draft tokens of one sequence in one step.
MAX_DRAFT_TOKENS = 32
# q is sent in units of 1 / WEIGHT_TOTAL.
WEIGHT_TOTAL = 1 << 16
# Candidates of a draft token unless told otherwise: with half as many, rejections cost more than is saved; what twice
# as many gain, drafting and checking them costs (docs/performance.md).
NUM_CANDIDATES = 128
# Most children of an expansion of the draft tree (F).
MAX_CHILDREN = 8
# Expansions of a sequence that both sides of a stream keep (E): at least, at most, and unless told otherwise.
MIN_EXPANSIONS = 64
MAX_EXPANSIONS = 4096
NUM_EXPANSIONS = 512
# No expansion is further behind the committed tokens that the drafter knows of.
MAX_DEPTH = 32
