"""The model card: one page about a finished run, as Markdown and as HTML."""

from tacit.card.content import card

__all__ = ["card"]
