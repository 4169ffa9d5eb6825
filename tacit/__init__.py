"""tacit: federated semi-supervised learning as real software."""

__version__ = "0.1.0"
