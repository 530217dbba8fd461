"""The pieces of layers: norms and linears with the tensors they read, and what all layers of a forward share."""
