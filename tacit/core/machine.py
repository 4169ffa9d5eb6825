"""What computes here, as far as it decides the last bits of a result: equal numbers are promised within one type."""

import platform
from functools import cache
from pathlib import Path

import torch

from tacit.core.errors import TacitError


@cache
def cpu_type() -> str:
    """The CPU's vendor, the instructions that torch uses on it, and torch's version.

    torch's own kernels differ by instruction set (`ATEN_CPU_CAPABILITY` chooses a smaller one), those of the libraries
    beneath it by vendor as well, and both from release to release. Sums then run in another order, and their last bit
    differs.

    >>> import re
    >>> bool(re.fullmatch(r".+ [A-Z0-9_ ]+, torch [0-9.]+.*", cpu_type()))
    True
    """
    return f"{_vendor()} {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def _vendor() -> str:
    known = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    found = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("vendor_id")), "")
    return known.get(found, found) or platform.machine() or "unknown"


def change_of_type(before: str) -> str:
    """What to tell whoever goes on with a run whose last round was computed on another type of CPU; '' if it was not.

    >>> change_of_type(cpu_type()), change_of_type("")           # a run from before this was recorded: nothing known
    ('', '')
    >>> change_of_type("Cray X-MP, torch 2.6.0")
    'The last round was computed on Cray X-MP, torch 2.6.0, and this is ...'
    """
    if before in ("", cpu_type()):
        return ""
    return (
        f"The last round was computed on {before}, and this is {cpu_type()}. The run goes on, but its numbers may "
        "differ slightly from those of a run that stayed on either: equal numbers are promised within one type."
    )


def pick_device(name: str) -> torch.device:
    """The device of an experiment; `auto` takes a GPU where there is one."""
    if name == "auto":
        mps = torch.backends.mps.is_available()
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise TacitError(f"device = '{name}' is not a device. Write auto, cpu, cuda, cuda:1 or mps.") from None
    here = {
        "cpu": 1,
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }
    if (device.index or 0) >= here.get(device.type, 0):
        raise TacitError(f"device = '{name}', but there is no such device here. Write device = 'auto' or 'cpu'.")
    return device
