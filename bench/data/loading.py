"""Counterpart of loading.cpp in Python: torch's DataLoader over torchvision's ImageFolder, decoded by Pillow or
by torchvision.io.decode_jpeg."""

import json
import sys
import time

import torch
import torchvision
from torchvision.transforms import v2

SIZE = 224


def pillow(folder):
    # Pillow executes the first two; PILToTensor keeps uint8.
    steps = [v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    return torchvision.datasets.ImageFolder(folder, v2.Compose(steps))


def read_jpeg(path):
    return torchvision.io.decode_jpeg(torchvision.io.read_file(path), torchvision.io.ImageReadMode.RGB)


def decode_jpeg(folder):
    steps = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
    return torchvision.datasets.ImageFolder(folder, v2.Compose(steps), loader=read_jpeg)


class Job:
    def __init__(self, dataset, batch, workers):
        self.dataset, self.batch, self.workers = dataset, batch, workers
        self.loader = self.make(persistent_workers=workers > 0)

    def make(self, **options):
        return torch.utils.data.DataLoader(self.dataset, self.batch, shuffle=True, num_workers=self.workers, **options)

    def epoch(self):
        """Times an epoch. Workers live from epoch to epoch, which is fastest."""
        begin = time.perf_counter()
        images = sum(len(data) for data, _ in self.loader)
        return {"images": images, "seconds": time.perf_counter() - begin}

    def look(self):
        """The mean of all values of an epoch."""
        total = 0
        for data, _ in self.loader:
            assert data.dtype == torch.uint8 and data.shape[1:] == (3, SIZE, SIZE)
            total += int(data.sum(dtype=torch.int64))
        return {"mean": total / (3 * SIZE * SIZE * len(self.dataset))}

    def first(self):
        begin = time.perf_counter()
        next(iter(self.make()))
        return {"seconds": time.perf_counter() - begin}

    def turn(self):
        """Times from an epoch's last batch to the next epoch's first, with the default options."""
        loader = self.make()
        for _ in loader:
            pass
        begin = time.perf_counter()
        next(iter(loader))
        return {"seconds": time.perf_counter() - begin}


def main():
    decoder, folder, batch, workers = sys.argv[1:]
    job = Job({"pillow": pillow, "decode_jpeg": decode_jpeg}[decoder](folder), int(batch), int(workers))
    for line in sys.stdin:
        print(json.dumps(getattr(job, line.strip())()), flush=True)


if __name__ == "__main__":
    main()
