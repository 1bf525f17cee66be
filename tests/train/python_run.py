"""Trains a small network in float64, for python_run_test.cpp.

    python python_run.py FOLDER STEPS CASE ...     trains two epochs, saves CASE.pth as the scripts do, and
                                                   takes STEPS more steps

If STEPS is not 0, CASE-result.pth then has the losses of these steps and the network.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
import torchvision
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    SequentialLR,
    StepLR,
)

EPOCHS, DONE, STEPS, BATCH = 8, 2, 2, 4  # STEPS: in each epoch
torch.set_num_threads(1)


def with_warmup(optimizer, epochs, main):
    warmup = LinearLR(optimizer, start_factor=0.1, total_iters=epochs)
    return SequentialLR(optimizer, [warmup, main], milestones=[epochs])


def decay_groups(network, decay, norm_decay):
    """Like torchvision's set_weight_decay()."""
    groups = {"other": [], "norm": []}
    for module in network.modules():
        is_norm = isinstance(module, torch.nn.BatchNorm2d)
        groups["norm" if is_norm else "other"] += module.parameters(recurse=False)
    return [
        {"params": groups["other"], "weight_decay": decay},
        {"params": groups["norm"], "weight_decay": norm_decay},
    ]


# The script, an optimizer for the network n, and a scheduler for the optimizer o.
CASES = {
    "imagenet": (
        "imagenet",
        lambda n: SGD(n.parameters(), 0.1, momentum=0.9, weight_decay=1e-4),
        lambda o: StepLR(o, 1, 0.1),
    ),
    "step": (
        "torchvision",
        lambda n: SGD(n.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True),
        lambda o: with_warmup(o, 1, StepLR(o, 2, 0.3)),
    ),
    "multistep": (
        "torchvision",
        lambda n: SGD(decay_groups(n, 1e-2, 0.0), 0.1, momentum=0.9),
        lambda o: MultiStepLR(o, [1, 3, 4], 0.3),
    ),
    "cosine": (
        "torchvision",
        lambda n: AdamW(n.parameters(), 1e-3, weight_decay=0.05),
        lambda o: with_warmup(o, 3, CosineAnnealingLR(o, EPOCHS - 3)),
    ),
    "exponential": (
        "torchvision",
        lambda n: RMSprop(n.parameters(), 1e-3, momentum=0.9, eps=0.03, alpha=0.9),
        lambda o: ExponentialLR(o, 0.9),
    ),
    "adam": (
        "torchvision",
        lambda n: Adam(n.parameters(), 1e-3, betas=(0.8, 0.99), amsgrad=True),
        lambda o: CosineAnnealingLR(o, EPOCHS, 1e-5),
    ),
}


def batch_of(step):
    """The same as batch_of() of python_run_test.cpp."""
    torch.manual_seed(100 + step)
    images = torch.randn((BATCH, 3, 32, 32), dtype=torch.float64)
    return images, torch.randint(10, (BATCH,))


def average_of(network):
    decay = 0.9
    average = lambda old, new, _: old + (1 - decay) * (new - old)
    return torch.optim.swa_utils.AveragedModel(network, avg_fn=average, use_buffers=True)


class Run:
    def __init__(self, case):
        self.script, make_optimizer, make_scheduler = CASES[case]
        torch.manual_seed(1)
        name = "resnet18" if self.script == "imagenet" else "shufflenet_v2_x0_5"
        self.network = getattr(torchvision.models, name)(num_classes=10).double()
        self.average = average_of(self.network)
        self.optimizer = make_optimizer(self.network)
        self.scheduler = make_scheduler(self.optimizer)

    def train(self, first, steps):
        losses = []
        for step in range(first, first + steps):
            images, labels = batch_of(step)
            loss = F.cross_entropy(self.network(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.average.update_parameters(self.network)
            losses.append(loss.detach())
            if (step + 1) % STEPS == 0:
                self.scheduler.step()
        return losses

    def checkpoint(self):
        if self.script == "imagenet":
            return {
                "epoch": DONE,
                "arch": "resnet18",
                "state_dict": torch.nn.DataParallel(self.network).state_dict(),
                "best_acc1": torch.tensor(12.5),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
            }
        return {
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": self.scheduler.state_dict(),
            "epoch": DONE - 1,
            "args": argparse.Namespace(device=torch.device("cpu"), lr=0.1, norm_weight_decay=None),
            "model_ema": self.average.state_dict(),
        }


def main():
    folder, steps, *cases = sys.argv[1:]
    for case in cases:
        run = Run(case)
        run.train(0, DONE * STEPS)
        torch.save(run.checkpoint(), f"{folder}/{case}.pth")
        if losses := run.train(DONE * STEPS, int(steps)):
            result = {"losses": torch.stack(losses), "model": run.network.state_dict()}
            torch.save(result, f"{folder}/{case}-result.pth")


main()
