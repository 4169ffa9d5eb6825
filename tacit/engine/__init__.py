"""Drives a run, round by round."""
