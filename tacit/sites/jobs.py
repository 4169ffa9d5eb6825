"""Jobs and diaries: how `tacit site run` and the server app, which Flower starts, tell each other things."""

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tacit.core.files import write_atomically

HOME = "TACIT_SERVER_HOME"  # the environment variable by which the server app finds the server's folder


@dataclass(frozen=True)
class Job:
    """What `tacit site run` wants."""

    experiment: dict[str, Any]
    out: str
    sites: tuple[str, ...]
    resume: bool = False
    wait: float = 300.0  # seconds until every site must be there
    patience: float = 3600.0  # seconds that a round waits for its last reply
    largest_reply: int = 0
    insecure: bool = False
    from_round: int | None = None  # with resume: forget the rounds after this many first
    without: tuple[str, ...] = ()  # with resume: sites that are not asked any more


def job_path(home: Path, name: str) -> Path:
    return home / "jobs" / f"{name}.json"


def leave_job(home: Path, job: Job) -> str:
    """Write a job where the server app finds it; its name."""
    name = secrets.token_hex(6)
    write_atomically(job_path(home, name), json.dumps(asdict(job)).encode())
    return name


class JobLog:
    """What happens in a job, a line each, for `tacit site run` and `tacit site status`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **entry: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def read(self) -> list[dict[str, Any]]:
        text = self.path.read_text() if self.path.is_file() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
