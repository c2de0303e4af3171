"""What peers have to agree on to draw the same random numbers. Imports nothing: `kernels.random` computes them."""

RANDOM_SCHEME = "philox4x32-10.2"
"""Name of everything that a random number depends on; peers compare it in the handshake.

It pins: Philox4x32 with 10 rounds; key = (seed's low word, seed's high word); counter = (position's low word, its high
word, purpose, place); the values of `Purpose`. DRAFT and ACCEPT have place 0: ACCEPT compares the uniform of
`uniforms`, DRAFT the first word's upper 16 bits. TARGET gives each token of the vocabulary an exponential variate of
its own: place = token // 4, and of the four words the one numbered token % 4, w, makes E = -log1p(-(w + 1/2) / 2**32).
The token that minimises E / weight is drawn, the lowest id among equals. Whoever changes one of these changes the name.

**What 32 bits mean for p.** A token of probability p wins with an E of about p: small E decide, and E is precise where
it is small (on a GPU to 2**-20 of its value; E above 5, which matters where one token has nearly everything, to 2**-24
of its probability). E lies on a lattice of spacing 2**-32, from 2**-33 on. By that a token is drawn too seldom by a
share of (2**-32 / p)**2 / 24 of its probability: one part in 6,000 at p = 2**-28, one in 100 at 2**-31, nearly half at
2**-34 and nearly all from 2**-36 on. What tokens lose together is less than 2**-34 for each of the vocabulary, 8e-6 for
128,256, and as much only where all of them are that improbable.
"""
