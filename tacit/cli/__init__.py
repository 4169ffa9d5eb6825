"""The command `tacit`."""

from tacit.cli.app import app, main

__all__ = ["app", "main"]
