"""FedMatch: weights σ + ψ, one part for labels and one for the rest; clients that think alike advise each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from tacit.method import AtLeastOne, Count, Method, NotNegative, Reply, Share, Task, mean_model
from tacit.payload import Payload, Weights, tensor_in, weights_in
from tacit.pieces.aggregate import shares, stacked, unstacked
from tacit.pieces.agreement import Advice, Ties, advice_of, helpers_of, inter_client_consistency, noise_image, refreshed
from tacit.pieces.decompose import Decomposed, cut_small, disjoint_batches, disjoint_penalty, joined
from tacit.pieces.train import batches, descend
from tacit.sides import Client, Hub


@dataclass(frozen=True)
class FedMatch(Method):
    """Labels move only σ, unlabelled images only ψ; whoever learned a part sends it, and each part is averaged.

    Every few rounds a client also gets the ψ of those clients whose models answer a fixed noise image most like its
    own. With its own σ they are its helpers: it stays close to their predictions, and a pseudo-label is what the
    majority says. Labels may be at the clients or at the server; at some clients only is our own construction.
    """

    threshold: Annotated[Share, "confidence that a pseudo-label needs"] = 0.75
    labeled_weight: Annotated[NotNegative, "of the cross-entropy on labels (lambda_s)"] = 10.0
    consistency: Annotated[NotNegative, "weight of the helpers' predictions and agreed labels (lambda_ICCS)"] = 0.01
    pull: Annotated[NotNegative, "of psi towards sigma (lambda_L2)"] = 10.0
    sparsity: Annotated[NotNegative, "weight of the L1 norm of psi (lambda_L1)"] = 1e-4
    cut: Annotated[NotNegative, "entries of psi up to this size are sent as 0"] = 5e-6
    psi_start: Annotated[NotNegative, "psi at the start, as a multiple of sigma"] = 0.2
    helpers: Annotated[Count, "clients that advise another (H)"] = 2
    helper_every: Annotated[AtLeastOne, "helpers come every so many rounds"] = 10
    remember: Annotated[Count, "the server remembers the psi of so many clients, the latest (0: of all)"] = 0
    ties: Annotated[Ties, "without a majority: the local model's class, or the lowest number"] = "local"
    debias: Annotated[bool, "FedDPL: divide each model's predictions by their mean before threshold and vote"] = False

    citation: ClassVar[str] = (
        "Jeong et al., Federated Semi-Supervised Learning with Inter-Client Consistency & Disjoint Learning, ICLR 2021"
    )
    server_sends: ClassVar = {"sigma": "weights", "psi": "weights", "helpers?": "any"}
    client_sends: ClassVar = {"sigma": "weights if labeled", "psi": "weights if unlabeled"}
    presets: ClassVar = {
        "paper": {"train.lr": 1e-3, "train.momentum": 0.0, "train.weight_decay": 1e-4, "train.clip": 0.0}
        | {"train.batch": 10, "train.epochs": 1, "views.weak": "none"},
        "released": {"ties": "lowest"},
        "smoke": {"threshold": 0.5, "labeled_weight": 1.0, "consistency": 0.5, "pull": 0.01, "helper_every": 2}
        | {"remember": 3, "train.lr": 0.1, "train.momentum": 0.9, "train.clip": 5.0},
    }

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        sigma = weights_in(super().server_start(hub, past), "model")
        psi = {name: self.psi_start * sigma[name] for name, _ in hub.model(sigma).named_parameters()}
        channels, size, _ = hub.shard.labeled.images.shape[1:]
        noise = noise_image(channels, size, hub.rng("noise"))  # the same one for all clients and rounds
        return {"sigma": self._learn_labels(sigma, psi, hub), "psi": psi, "noise": noise, "memory": {}}

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        down: Payload = {"sigma": state["sigma"], "psi": state["psi"]}
        memory = weights_in(state, "memory") if (hub.round + 1) % self.helper_every == 0 else {}
        each = [(client, helpers_of(client, memory, self.helpers)) for client in hub.sample_clients()]
        return [Task(client, {**down, "helpers": helpers} if helpers else down) for client, helpers in each]

    def client_train(self, task: Task, kept: Payload, me: Client) -> Reply:
        sigma, psi = task.weights("sigma"), task.weights("psi")
        labels, images = len(me.shard.labeled), len(me.shard.unlabeled)
        if not images:
            return Reply(send={"sigma": self._learn_labels(sigma, psi, me)}, examples=labels)
        model = Decomposed(me.model(sigma), sigma, psi)
        optimizer, order, chance = me.optimizer(model), me.rng("order"), me.rng("views")
        advice = self._ask(model, task, me)
        for _ in range(me.epochs):
            for known, unknown in disjoint_batches(labels, images, me.train.batch, order):
                if known is not None:
                    descend(model, optimizer, self._label_loss(model, known, me, chance), me.train.clip)
                if unknown is not None:
                    descend(model, optimizer, self._image_loss(model, unknown, advice, me, chance), me.train.clip)
        send: Payload = {"psi": cut_small(model.part("psi"), self.cut)}
        if labels:
            send["sigma"] = {**me.weights(model.merged()), **model.part("sigma")}  # a net's buffers go with sigma
        return Reply(send=send, examples=labels + images, metrics={"helpers": len(advice.probs)})

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        parts = {name: weights_in(state, name) for name in ("sigma", "psi")}
        for name in parts:
            parties = [reply for reply in replies if name in reply.send and reply.examples > 0]
            if parties:
                parts[name] = mean_model(parties, shares([1.0] * len(parties)), name)
        memory = self._remember(state, replies, hub)
        return {**state, "sigma": self._learn_labels(**parts, side=hub), "psi": parts["psi"], "memory": memory}

    def server_answer(self, state: Payload, hub: Hub) -> Weights:
        return joined(weights_in(state, "sigma"), weights_in(state, "psi"))

    def _label_loss(self, model: Decomposed, which: Tensor, side: Client | Hub, chance: Generator) -> Tensor:
        """What sigma learns: cross-entropy on labels."""
        labeled = side.shard.labeled
        logits = model.learning("sigma")(side.views.weak_view(labeled.images[which], chance))
        return self.labeled_weight * F.cross_entropy(logits, labeled.labels[which])

    def _image_loss(self, model: Decomposed, which: Tensor, advice: Advice, me: Client, chance: Generator) -> Tensor:
        """What psi learns: consistency with the helpers and agreed labels, both where sure, and the penalty."""
        images = me.shard.unlabeled[which]
        loss = disjoint_penalty(model.sigma, model.learning("psi").psi, self.pull, self.sparsity)
        with torch.set_grad_enabled(len(advice.probs) > 0):
            logits = model(me.views.plain(images))
        label, sure = advice.label(which, logits.detach().softmax(dim=1), self.ties)
        me.audit(which, label, sure)
        if not sure.any():
            return loss
        strong = model(me.views.strong_view(images, chance))
        apart = inter_client_consistency(logits[sure], advice.probs[:, which][:, sure])
        return loss + self.consistency * (apart + F.cross_entropy(strong[sure], label[sure]))

    def _ask(self, model: Decomposed, task: Task, me: Client) -> Advice:
        """What the helpers say of this client's images, with this client's sigma and their psi; fixed for the round."""
        sigma, images = task.weights("sigma"), me.shard.unlabeled
        others = unstacked(task.weights("helpers")) if "helpers" in task.send else []
        said = [me.predict(me.model(joined(sigma, psi)), images) for psi in others]
        helpers = torch.stack(said) if said else torch.zeros(0, len(images), me.classes, device=me.device)
        return advice_of(helpers, self.threshold, me.predict(model, images) if self.debias else None)

    def _learn_labels(self, sigma: Weights, psi: Weights, side: Client | Hub) -> Weights:
        """Sigma after training on this side's labels alone; as it was where there are none."""
        if not len(side.shard.labeled):
            return sigma
        model = Decomposed(side.model(sigma), sigma, psi)
        optimizer, order, chance = side.optimizer(model), side.rng("order"), side.rng("views")
        for _ in range(side.epochs):
            for which in batches(len(side.shard.labeled), side.train.batch, order):
                descend(model, optimizer, self._label_loss(model, which, side, chance), side.train.clip)
        return {**side.weights(model.merged()), **model.part("sigma")}

    def _remember(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Weights:
        """For each client its last psi, and what its model answers to the noise."""
        fresh = [reply for reply in replies if "psi" in reply.send and reply.examples > 0]
        if not fresh or not self.helpers:
            return weights_in(state, "memory")
        net, answers = hub.model(weights_in(state, "sigma")), []
        for reply in fresh:
            sigma = weights_in(reply.send if "sigma" in reply.send else state, "sigma")
            net.load_state_dict(joined(sigma, reply.weights("psi")))
            answers.append(hub.predict(net, tensor_in(state, "noise").to(hub.device)).cpu())
        who = {"client": torch.tensor([reply.client for reply in fresh]), "output": torch.cat(answers)}
        psis = stacked([reply.weights("psi") for reply in fresh])
        return refreshed(weights_in(state, "memory"), {**who, **psis}, self.remember)
