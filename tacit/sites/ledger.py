"""What a site ought to remember of a run: a small list beside its memory, so that a file that is gone is noticed.

In a simulation the run's manifest does this. A site has none, and its memory may lie on a disk that somebody tidies.
"""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from tacit.core.errors import TacitError
from tacit.core.files import read_bytes, write_atomically
from tacit.runs.memory import ClientMemory, version_of


class LedgerEntry(BaseModel):
    """What was there when a round's answer had been made."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    rounds: int = 0  # up to and with the last one that this site answered in; 0: none
    files: list[str] = []


class Ledger:
    """The list for one run, in a file beside the folder with what was kept."""

    def __init__(self, memory: ClientMemory) -> None:
        self.memory = memory
        self.path = memory.folder.with_name(memory.folder.name + ".json")

    def read(self) -> LedgerEntry:
        if not self.path.exists():
            return LedgerEntry()
        try:
            return LedgerEntry.model_validate(json.loads(read_bytes(self.path)))
        except (ValueError, ValidationError) as error:
            raise TacitError(
                f"{self.path} is damaged ({type(error).__name__}): it lists what this site keeps for a run. Put it "
                "back from a copy; or remove it, if all that is in the folder of the same name is as it was."
            ) from error

    def write(self, client: int, step: int) -> None:
        """After the work of a round: all that is kept now should be there next time."""
        entry = LedgerEntry(rounds=step + 1, files=sorted(self.memory.written([client])))
        write_atomically(self.path, (entry.model_dump_json() + "\n").encode())

    def check(self, step: int) -> None:
        """Refuse to go on at this round without what was kept before it."""
        if missing := [path for path in needed(self.read().files, step) if not (self.memory.folder / path).exists()]:
            raise TacitError(
                f"What this site kept is not all there: {', '.join(missing[:3])} in {self.memory.folder} is missing. "
                f"Put it back from a copy. To let the site go on as if it were new, remove {self.path} as well."
            )


def needed(files: list[str], step: int) -> list[str]:
    """Of each name the newest version from before this round: what its client will be given to read.

    >>> needed(["client-0/local@1-0.safetensors", "client-0/local@2-0.safetensors"], step=3)
    ['client-0/local@2-0.safetensors']
    >>> needed(["client-0/local@1-0.safetensors", "client-0/local@2-0.safetensors"], step=2)
    ['client-0/local@1-0.safetensors']
    """
    newest: dict[str, tuple[tuple[int, int], str]] = {}
    for file in files:
        if (found := version_of(Path(file).name)) and found[1] < (step, 0):
            newest[found[0]] = max(newest.get(found[0], ((-1, -1), "")), (found[1], file))
    return sorted(file for _, file in newest.values())
