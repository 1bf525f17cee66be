"""Trains a small network in float64, for python_run_test.cpp.

    python python_run.py save FOLDER CASE ...     trains two epochs, saves CASE.pth as the scripts
                                                  do, and takes five more steps
    python python_run.py resume FOLDER CASE ...   resumes from CASE.pth as the scripts do, and takes
                                                  five steps

Then CASE-result.pth has the losses of the five steps and the network.
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

    def resume(self, checkpoint):
        if self.script == "imagenet":
            assert checkpoint["epoch"] == DONE and checkpoint["arch"] == "resnet18"
            assert checkpoint["best_acc1"].to("cpu") == 50
            torch.nn.DataParallel(self.network).load_state_dict(checkpoint["state_dict"])
        else:
            assert checkpoint["epoch"] + 1 == DONE
            self.network.load_state_dict(checkpoint["model"])
            self.average.load_state_dict(checkpoint["model_ema"])
            assert self.average.n_averaged == DONE * STEPS
        key = "scheduler" if self.script == "imagenet" else "lr_scheduler"
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.scheduler.load_state_dict(checkpoint[key])


def expect_equal(loaded, expected, path=""):
    """Compares the state that was loaded with Python's own state at this point."""
    if isinstance(expected, dict):
        for key in expected:
            expect_equal(loaded[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(loaded) == len(expected), path
        for i, (one, other) in enumerate(zip(loaded, expected)):
            expect_equal(one, other, f"{path}[{i}]")
    else:
        assert loaded == expected, (path, loaded, expected)


def expect_loaded_all(run, case):
    """Compares with a run that reached this point without a checkpoint."""
    alone = Run(case)
    for _ in range(DONE):
        alone.optimizer.step()
        alone.scheduler.step()
    expect_equal(run.scheduler.state_dict(), alone.scheduler.state_dict(), "scheduler")
    groups = alone.optimizer.state_dict()["param_groups"]
    expect_equal(run.optimizer.state_dict()["param_groups"], groups, "param_groups")


def main():
    action, folder, *cases = sys.argv[1:]
    for case in cases:
        run = Run(case)
        file = f"{folder}/{case}.pth"
        if action == "save":
            run.train(0, DONE * STEPS)
            torch.save(run.checkpoint(), file)
        else:
            run.resume(torch.load(file, weights_only=True))
            expect_loaded_all(run, case)
        losses = torch.stack(run.train(DONE * STEPS, 5))
        result = {"losses": losses, "model": run.network.state_dict()}
        torch.save(result, f"{folder}/{case}-result.pth")


main()
