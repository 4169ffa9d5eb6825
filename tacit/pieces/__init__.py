"""Pure functions that methods are made of: train, label, loss, aggregate, augment. They need torch, nothing else."""
