"""What peers have to agree on to draw the same random numbers. Imports nothing: `kernels.random` computes them."""

RANDOM_SCHEME = "philox4x32-10.1"
"""Name of everything that a random number depends on; peers compare it in the handshake.

It pins: Philox4x32 with 10 rounds; key = (seed's low word, seed's high word); counter = (position's low word, its high
word, purpose, 0); the values of `Purpose`; how uniforms are made of the four words (`uniforms`). Whoever changes one of
these changes the name.
"""
