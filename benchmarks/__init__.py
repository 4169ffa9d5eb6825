"""Speed and memory, always as ratios against a reference in the same run."""
