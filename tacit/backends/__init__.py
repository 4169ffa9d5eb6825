"""Where clients run: in this process (local) or in several (pool). The numbers are the same, bit for bit."""

from tacit.backends.base import Backend, Outcome, waves
from tacit.backends.local import LocalBackend
from tacit.backends.pool import PoolBackend

__all__ = ["Backend", "LocalBackend", "Outcome", "PoolBackend", "waves"]
