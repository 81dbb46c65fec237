"""Linear layers of torch models with weights of a few bits."""
