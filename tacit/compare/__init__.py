"""Runs beside each other: rows, whether they are on a par, what came out, tables."""
