"""The verifier: the target model's forward pass and the verdict on every proposal."""
