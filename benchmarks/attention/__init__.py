"""S2-Attention beside dense attention: alone, in generation, in a training step, and what models learn with it."""
