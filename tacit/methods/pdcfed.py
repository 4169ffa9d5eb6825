"""PDCFed: pseudo-labels in two stages, by how the prediction changes from a weak to a strong view."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from tacit.method import Count, Method, NotNegative, Positive, Reply, Share, Stage, Task, mean_model
from tacit.methods._pseudo import learn_batches, optimizer_with
from tacit.methods.fixmatch import WarmUp
from tacit.payload import Payload, tensor_in, weights_in
from tacit.pieces.aggregate import shares
from tacit.pieces.descent import momentum_of
from tacit.pieces.two_stage import TwoStage
from tacit.sides import Client, Hub


@dataclass(frozen=True)
class PDCFed(Method):
    """Unlabelled clients believe, batch by batch, what a weak view is surely seen as, and what it is fairly surely
    seen as where the strong view agrees; an entropy term sharpens what agrees. Labelled clients weigh more.

    A client that holds both trains on both in each step, and a server that holds labels trains on them after each
    merge: both are ours, the paper has clients that hold either.
    """

    threshold: Annotated[Share, "stage one: confidence that is enough by itself (tau_upper)"] = 0.85
    lower: Annotated[Share, "stage two: confidence above which agreement decides (tau_lower)"] = 0.6
    agreement: Annotated[Share, "stage two: agreement of weak and strong view that is enough (sigma)"] = 0.6
    weight: Annotated[NotNegative, "of the pseudo-labels' loss"] = 0.027
    entropy: Annotated[NotNegative, "weight of the entropy term"] = 0.001
    temperature: Annotated[Positive, "of the predictions in the entropy term"] = 0.9
    decay: Annotated[Share, "of the running mean and variance of changes, by batch"] = 0.999
    labeled_epochs: Annotated[Count, "epochs on labels alone in a round (0: train.epochs)"] = 2
    unlabeled_lr: Annotated[Positive, "learning rate where there are unlabelled images"] = 0.007
    labeled_boost: Annotated[Positive, "labelled clients weigh so many times"] = 6.0
    warmup: Annotated[Count, "rounds of FedAvg on the labels before"] = 0
    warmup_epochs: Annotated[Count, "epochs in a round of the warm-up (0: train.epochs)"] = 0
    keep_momentum: Annotated[bool, "clients keep their momentum from round to round"] = False
    double_softmax: Annotated[bool, "as released: probabilities are taken for logits in the cross-entropy"] = False

    citation: ClassVar[str] = (
        "Zhu, Ma and Sun, Two-stage sampling with predicted distribution changes in federated semi-supervised "
        "learning, Knowledge-Based Systems 295 (2024) 111822"
    )
    placements: ClassVar = ("some-clients", "clients", "server")
    client_keeps: ClassVar = {"mean?": "any", "variance?": "any", "momentum?": "any"}
    presets: ClassVar = {  # what the authors set for other data is on the docs page
        "paper": {"participation.fraction": 0.5, "train.batch": 128, "train.lr": 0.01, "rounds": 500},
        "released": {"double_softmax": True, "keep_momentum": True, "views.weak": "resize-crop", "views.flip": "yes"},
        "smoke": {"warmup": 1, "threshold": 0.6, "lower": 0.3, "agreement": 0.3, "weight": 1.0, "decay": 0.8}
        | {"unlabeled_lr": 0.05, "keep_momentum": True, "participation.fraction": 1.0, "train.lr": 0.1},
    }

    def __post_init__(self) -> None:
        if self.lower > self.threshold:
            raise ValueError(
                f"lower = {self.lower} is above threshold = {self.threshold}, so that nothing would be left for the "
                "second stage; write a lower one (equal ones: one stage only)"
            )

    def effort(self, epochs: int) -> tuple[int, int]:
        return self.labeled_epochs or epochs, epochs

    def before(self) -> tuple[Stage, ...]:
        return (Stage("warm-up", WarmUp(epochs=self.warmup_epochs), self.warmup),) if self.warmup else ()

    def client_train(self, task: Task, kept: Payload, me: Client) -> Reply:
        model = me.model(task.weights("model"))
        keep: Payload = {}
        if len(me.shard.unlabeled):
            optimizer, rule = optimizer_with(kept, model, me, me.scheduled(self.unlabeled_lr)), self.rule(kept, me)
            strong = me.views.strong_view
            _, loss = learn_batches(model, rule, optimizer, me, learned=strong, weight=self.weight)
            keep |= rule.memory()
        else:
            optimizer = optimizer_with(kept, model, me, me.learning_rate)
            loss = me.fit_labeled(model, epochs=self.labeled_epochs or None, optimizer=optimizer)
        if self.keep_momentum:
            keep["momentum"] = momentum_of(model, optimizer)
        examples = len(me.shard.labeled) + len(me.shard.unlabeled)
        return Reply(send={"model": me.weights(model)}, examples=examples, keep=keep, metrics={"loss": loss})

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        boosts = [self.labeled_boost if reply.client in hub.labeled_clients else 1.0 for reply in replies]
        weights = shares([reply.examples * boost for reply, boost in zip(replies, boosts, strict=True)])
        hub.note(client_weights=weights)
        model = mean_model(replies, weights) if any(weights) else weights_in(state, "model")
        return {"model": hub.finetune(model)}

    def rule(self, kept: Payload, me: Client) -> TwoStage:
        """Which predictions are believed, with this client's running mean and variance (at first 1/K and 1)."""
        usual: Payload = {"mean": torch.tensor(1.0 / me.classes), "variance": torch.tensor(1.0), **kept}
        return TwoStage(
            mean=tensor_in(usual, "mean"),
            variance=tensor_in(usual, "variance"),
            decay=self.decay,
            upper=self.threshold,
            lower=self.lower,
            least=self.agreement,
            entropy=self.entropy,
            temperature=self.temperature,
            double_softmax=self.double_softmax,
        )
