"""`research.bench --shape`: the speed of rounds on tensors of a large model's shape, with simulated acceptance."""
