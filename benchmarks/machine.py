"""Where and with which code something was measured."""

import platform
import subprocess
from pathlib import Path


def commit() -> str:
    """Which code this is; "-dirty" where it differs from what was committed (pages and records may)."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "tacit", "benchmarks/*.py")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")


def processor() -> str:
    """The processor as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
