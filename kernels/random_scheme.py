"""What peers have to agree on to draw the same random numbers. Imports nothing: `kernels.random` computes them."""

RANDOM_SCHEME = "philox4x32-10.2"
"""Name of everything that a random number depends on; peers compare it in the handshake.

It pins: Philox4x32 with 10 rounds; key = (seed's low word, seed's high word); counter = (position's low word, its high
word, purpose, place); the values of `Purpose`. DRAFT and ACCEPT have place 0; ACCEPT compares the uniform of `uniforms`,
DRAFT the first word's upper 16 bits. TARGET gives each token of the vocabulary an exponential variate of its own: place =
token // 4, and of the four words the one numbered token % 4, w, makes E = -log1p(-(w + 1/2) / 2**32). The token that
minimises E / weight is drawn, the lowest id among equals. Whoever changes one of these changes the name.

**What 32 bits mean.** Tokens are decided by small E: one of probability p wins with an E of about p. That is why E is made
by log1p of a small number: it has a relative precision of 2**-22 or better down to its smallest value, 2**-33. Below that
it is a lattice of spacing 2**-32, by which the probability p of a token is drawn too seldom by a share of
(2**-32 / p)**2 / 24: one part in 6,000 at p = 2**-28, one in 100 at 2**-31, and what is below 2**-36 is hardly ever drawn. All
tokens below 2**-32 together have a probability of at most vocabulary / 2**32, 3e-5 for 128,256 tokens, and no less of them
is lost only where all of that is in such tokens. Both sides of a comparison, plain and speculative, draw from this one
distribution: with coupled verification they are equal token for token.
"""
