"""How good a model is, and how right pseudo-labels were: the only code that sees true labels."""
