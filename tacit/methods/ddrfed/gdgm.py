"""GDGM, DDRFed's global data generation module: two stages, one that trains a generator and one that uses it.

All clients together train an unconditional diffusion model on all their images, labels unused. The server then draws
images with it, and deals them evenly to the clients, who keep them on their disks.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contract.method import UNKNOWN, Held, Method, Reply, Stage, Task
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, tensor_in, weights_in
from tacit.methods.ddrfed.diffusion import denoising_loss, ema_decay, from_bytes
from tacit.methods.ddrfed.generator import GDGM
from tacit.nets.optimizer import optimizer_step
from tacit.nets.unet import UNet, require_diffusers
from tacit.pieces.aggregate import residual
from tacit.pieces.train import batches, weights_of
from tacit.views.pipe import augment_pipe

LARGEST_GRADIENT = 1.0  # DDPM's


def generator_stages(options: GDGM) -> tuple[Stage, ...]:
    """The two stages, with these options."""
    shared = {option.name: getattr(options, option.name) for option in dataclasses.fields(GDGM)}
    training = Stage("diffusion", Diffusion(**shared), options.diffusion_rounds)
    return training, Stage("generation", Generation(**shared), options.generation_rounds)


@dataclass(frozen=True)
class Diffusion(GDGM, Method):
    """Federated averaging of a denoiser (Algorithm 1): every client, all its images, no labels."""

    server_sends: ClassVar = {"unet": "weights"}
    client_sends: ClassVar = {"unet": "weights"}
    merges_each: ClassVar = "the training of its generator notes how much each client holds; write method.gdgm = false"

    def check_installed(self) -> None:
        require_diffusers()

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> None:
        return None

    def estimated_weights_bytes(self, classifier: int, channels: int, features: int = 0) -> int:
        net = self.new_unet(channels)
        return sum(tensor.numel() * tensor.element_size() for tensor in net.state_dict().values())

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        first = weights_of(self.new_unet(hub.channels, hub.rng("first weights")))
        return {"unet": first, "ema": first, "held": torch.full((hub.clients,), -1.0)}  # -1: not known yet

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        return [Task(client, {"unet": state["unet"]}) for client in hub.sample_clients()]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        net = self.unet(me.channels, task.weights("unet")).to(me.device).train()
        rate = me.scheduled(self.diffusion_lr)  # by the schedule of train.schedule
        optimizer = torch.optim.Adam(net.parameters(), lr=rate, fused=True)
        images, generator = me.shard.images, me.rng("diffusion")
        total, steps = 0.0, 0
        for _ in range(self.diffusion_epochs):
            for which in batches(len(images), self.diffusion_batch, generator):
                moved, label = augment_pipe(from_bytes(images[which]), generator, self.augment)
                loss = denoising_loss(with_label(net, label), moved, generator)
                optimizer_step(net, optimizer, loss, LARGEST_GRADIENT)
                total, steps = total + float(loss.detach()), steps + 1
        metrics = {"denoising_loss": total / max(steps, 1)}
        return Reply(send={"unet": weights_of(net)}, examples=len(images), metrics=metrics)

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        held = tensor_in(state, "held").clone()
        for reply in replies:
            held[reply.client] = reply.examples
        if not any(reply.examples for reply in replies):
            return {**state, "held": held}
        unet = hub.mean_model(weights_in(state, "unet"), replies, name="unet")  # Eq. 9
        hub.note(denoising_loss=mean_figure(replies, "denoising_loss"))
        ema = residual(weights_in(state, "ema"), unet, ema_decay(self.ema, hub.round)) if hub.round else unet
        return {"unet": unet, "ema": ema, "held": held}

    def server_answer(self, state: Payload, hub: Hub) -> None:
        return None  # no classifier yet


@dataclass(frozen=True)
class Generation(GDGM, Method):
    """The server draws a part of the images in each round; every client gets as many, and keeps them as bytes."""

    server_sends: ClassVar = {"images": "any"}
    client_sends: ClassVar = {}
    merges_each: ClassVar = "its generated images are dealt by how much each client holds; write method.gdgm = false"
    client_keeps: ClassVar = {"generated": "any"}

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> None:
        return None

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        return {name: past["diffusion"][name] for name in ("ema", "held")}

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        each = self._images_each(tensor_in(state, "held"))
        now = each * (hub.round + 1) // hub.rounds - each * hub.round // hub.rounds
        shape = (now * hub.clients, hub.channels, hub.size, hub.size)
        images = self.generate(weights_in(state, "ema"), shape, hub.rng("generated"), hub.device)
        images = images[torch.randperm(len(images), generator=hub.rng("deal"))]
        hub.note(generated=len(images))
        if hub.round == 0:
            hub.draw("generated", images[:100])
        return [Task(client, {"images": images[client :: hub.clients].clone()}) for client in range(hub.clients)]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        earlier = [tensor_in(memory, "generated")] if "generated" in memory else []
        dealt = torch.cat([*earlier, task.tensor("images").cpu()])
        return Reply(send={}, examples=len(dealt), keep={"generated": dealt}, metrics={"generated": len(dealt)})

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        return state

    def server_answer(self, state: Payload, hub: Hub) -> None:
        return None  # no classifier yet

    def _images_each(self, held: Tensor) -> int:
        """ψ · |D| / M, where a client that never told how much it holds counts as the mean of the others."""
        known = held[held >= 0]
        return round(self.psi * float(known.double().mean())) if len(known) else 0


def with_label(net: UNet, label: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The net as a function of noisy images and times, told what was done to them."""
    return lambda noisy, times: net(noisy, times, label)


def mean_figure(replies: Sequence[Reply], name: str) -> float:
    """The mean of a figure over the clients that have it; NaN where none has."""
    values = [reply.metrics[name] for reply in replies if name in reply.metrics]
    return sum(values) / len(values) if values else math.nan
