"""A run as one wants it in a notebook: a DataFrame of its rounds, predictions, a plot, its card."""

from functools import cached_property
from pathlib import Path
from typing import Any

from tacit.core.errors import TacitError
from tacit.core.text import as_word
from tacit.evaluation.headline import headline
from tacit.inference.images import as_items
from tacit.inference.model import Model, load_model
from tacit.inference.predict import Predictions, predict_items
from tacit.runs.folder import Run


class NotebookRun(Run):
    """What `tacit.run` and `tacit.load` return."""

    def __repr__(self) -> str:
        summary = self.summary
        if summary is None:
            return f"<run in {self.folder}, {len(self.rounds())} rounds done, not finished>"
        figure = headline(summary)
        return f"<run in {self.folder}: {summary['method']} on {summary['data']}{', ' + figure if figure else ''}>"

    @property
    def records(self) -> Any:
        """All finished rounds: a DataFrame with one row a round if pandas is there, else a list of dicts."""
        try:
            import pandas
        except ImportError:
            return self.rounds()
        return pandas.DataFrame(self.rounds())

    @cached_property
    def model(self) -> Model:
        """The trained model with its classes, its size and its temperature."""
        return load_model(self.folder)

    def predict(self, images: Any, *, abstain: float = 0.0) -> Predictions:
        """The classes of images: a path or several, an array [N, H, W], [N, H, W, 3] or [N, 3, H, W], opened images.

        `.labels`, `.confidence`, `.probabilities`, `.to_pandas()`, `.save("out.csv")`; below the confidence `abstain`
        no class is named. The same answers as `tacit predict`.
        """
        return predict_items(self.model, as_items(images), abstain)

    @property
    def card(self) -> str:
        """The model card as Markdown; `card.html` beside it is for a browser."""
        path = self.folder / "card.md"
        if not path.is_file():
            raise TacitError(
                f"There is no card in {self.folder}: the run is not finished (tacit resume {as_word(self.folder)})."
            )
        return path.read_text()

    def export(self, path: str | Path, to: str = "onnx") -> Path:
        """The model as one file: `onnx`, `torch` or `safetensors`."""
        from tacit.inference.export import export

        export(self.model, to, Path(path))
        return Path(path)

    def plot(self) -> Any:
        """Accuracy, pseudo-labels and accuracy by class over the rounds, as a matplotlib figure."""
        from tacit.inference.plot import plot_run

        return plot_run(self)
