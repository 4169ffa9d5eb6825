"""A finished model in use: predict, evaluate, export, advise. Nothing here trains."""
