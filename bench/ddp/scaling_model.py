#!/usr/bin/env python3
"""Prints the modelled table of docs/scaling.md and draws docs/scaling.svg. Nothing here is measured.

  bench/ddp/scaling_model.py [--bandwidth 1.25] [--latency 50] [--shared_memory 20] [--backward 0.5]
                             [--ranks 8 64 1024] [--svg FILE]

An all-reduce of b bytes over n ranks takes steps * latency + 2 (n - 1) / n * b / bandwidth: a ring, which is
what Gloo runs, has 2 (n - 1) steps, halving and doubling 2 log2 n. DistributedDataParallel sends the
gradients of ResNet-50 bucket by bucket, each as soon as backward has filled it, one after the other; a step waits for
those that are left when backward ends.

SyncBatchNorm's ranks merge their rows up a tree: within a host through shared memory, between h hosts in log2 h hops,
each of which brings one row; up to 16 ranks that share no memory exchange all rows in one hop. Gloo sends a row once
the receiver has announced that it expects one: one message more in the first hop of the tree, and in each hop of a
ring. A layer's forward takes h - 1 hops around the ring, each with the rows of a host, and its backward 2 (h - 1).
"""

import argparse
import math
import pathlib

MIB = 1 << 20
FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB  # PyTorch's defaults
POWER_SGD_RANK = 1  # PyTorch's default
NORM_CHANNELS = 26560  # total of ResNet-50's 53 batch norm layers
NORM_LAYERS = 53
RANKS_OF_A_HOST = 8
ONE_HOP_RANKS = 16  # kMaxOneHopRanks in lib/dist/src/comm/transport/gloo.cpp


def resnet50():
    """Shapes of the parameters, from the first layer to the last."""
    shapes, inputs = [(64, 3 * 7 * 7), (64,), (64,)], 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(depth):
            for rows, columns in ((width, inputs), (width, 9 * width), (4 * width, width)):
                shapes += [(rows, columns), (rows,), (rows,)]
            if block == 0:
                shapes += [(4 * width, inputs), (4 * width,), (4 * width,)]
            inputs = 4 * width
    return shapes + [(1000, inputs), (1000,)]


def buckets(shapes):
    """Shapes by bucket, in the order in which backward fills them. As in c10d, a bucket is closed as soon as it
    has reached its size."""
    made, limit = [[]], FIRST_BUCKET
    for shape in reversed(shapes):
        made[-1].append(shape)
        if sum(map(size, made[-1])) >= limit:
            made.append([])
            limit = BUCKET
    return [bucket for bucket in made if bucket]


def size(shape):
    return 4 * math.prod(shape)


def power_sgd(shape):
    """Bytes of both factors, or of the gradient if the factors have half as many or more."""
    rows, columns = shape[0], math.prod(shape[1:])
    factors = 4 * POWER_SGD_RANK * (rows + columns)
    return factors if len(shape) > 1 and 2 * factors < size(shape) else size(shape)


class Hook:
    def __init__(self, bytes_of, all_reduces):
        self.bytes_of = bytes_of
        self.all_reduces = all_reduces  # for each bucket, one after the other


HOOKS = {"allreduce": Hook(size, 1),
         "fp16, bf16": Hook(lambda shape: size(shape) // 2, 1),
         "PowerSGD": Hook(power_sgd, 3)}  # one for uncompressed gradients, and one for each of the two factors


class Network:
    def __init__(self, arguments):
        self.latency, self.bandwidth = arguments.latency * 1e-6, arguments.bandwidth * 1e9
        self.shared_memory = arguments.shared_memory * 1e-6
        self.backward = arguments.backward

    def steps(self, ranks, ring=True):
        """Latency of one all-reduce's messages, in seconds."""
        return self.latency * (2 * (ranks - 1) if ring else 2 * math.ceil(math.log2(ranks)))

    def exchange(self, ranks, bucket, hook, ring=True):
        sent = 2 * (ranks - 1) / ranks * sum(map(hook.bytes_of, bucket))
        return hook.all_reduces * self.steps(ranks, ring) + sent / self.bandwidth

    def exposed(self, ranks, filled, hook, ring=True):
        """Seconds that the exchange lasts beyond the end of backward, and the seconds of the whole exchange."""
        total = sum(size(shape) for bucket in filled for shape in bucket)
        ready = end = busy = 0.0
        for bucket in filled:
            ready += self.backward * sum(map(size, bucket)) / total
            takes = self.exchange(ranks, bucket, hook, ring)
            end, busy = max(ready, end) + takes, busy + takes
        return max(end - self.backward, 0), busy

    def norm_exchange(self, hosts, ranks_of_a_host, channels, ring=False):
        """Seconds of the exchanges of a layer's forward and backward. A row has two float64 per channel."""
        row = 8 * 2 * channels
        if ring:
            messages = 2 * 3 * (hosts - 1)
            received = (hosts - 1) * ranks_of_a_host * row + 2 * (hosts - 1) / hosts * row
        else:
            hops = norm_hops(hosts, ranks_of_a_host)
            messages = 2 * (hops + 1) if hosts > 1 else 0
            received = 2 * row * (hops if hops > 1 else hosts - 1)
        steps = 2 if hosts > 1 else 1  # to the host's leader and back, or among all ranks
        within = 2 * steps * self.shared_memory if ranks_of_a_host > 1 else 0
        return within + messages * self.latency + received / self.bandwidth


def norm_hops(hosts, ranks_of_a_host=RANKS_OF_A_HOST):
    """Number of hops between hosts."""
    if ranks_of_a_host == 1 and 1 < hosts <= ONE_HOP_RANKS:
        return 1
    return math.ceil(math.log2(hosts))


def table(network, ranks_of_rows):
    shapes = resnet50()
    filled = buckets(shapes)
    sizes = [sum(map(size, bucket)) / MIB for bucket in filled]
    print(f"ResNet-50: {sum(sizes):.1f} MiB of gradients in {len(filled)} buckets "
          f"({', '.join(f'{one:.1f}' for one in sizes)} MiB)\n")
    print("| ranks | hook | MB sent by a rank | all-reduces, ring ms | of it latency | waited for, ring ms | "
          "halving-doubling ms | efficiency, ring |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks in ranks_of_rows:
        for name, hook in HOOKS.items():
            sent = sum(map(hook.bytes_of, shapes))
            waits, busy = network.exposed(ranks, filled, hook)
            other, _ = network.exposed(ranks, filled, hook, ring=False)
            latency = len(filled) * hook.all_reduces * network.steps(ranks)
            # Assumes that forward takes half as long as backward.
            step = 1.5 * network.backward
            print(f"| {ranks} | {name} | {2 * (ranks - 1) / ranks * sent / 1e6:.1f} | {1000 * busy:.0f} | "
                  f"{latency / busy:.0%} | {1000 * waits:.0f} | {1000 * other:.0f} | {step / (step + waits):.0%} |")
    print()
    print("| ranks | connections of a rank | of the whole group | of the store |")
    print("|---|---|---|---|")
    for ranks in ranks_of_rows:
        print(f"| {ranks} | {ranks - 1} | {ranks * (ranks - 1) // 2} | {ranks} |")
    print()
    print("| ranks | hosts | hops between hosts | SyncBatchNorm, ms | share of the step | over a ring, ms |")
    print("|---|---|---|---|---|---|")
    for ranks_of_a_host in (RANKS_OF_A_HOST, 1):
        for ranks in ranks_of_rows:
            hosts = ranks // ranks_of_a_host
            channels = NORM_CHANNELS / NORM_LAYERS
            tree, ring = (NORM_LAYERS * network.norm_exchange(hosts, ranks_of_a_host, channels, over_ring)
                          for over_ring in (False, True))
            print(f"| {ranks} | {hosts} | {norm_hops(hosts, ranks_of_a_host)} | {1000 * tree:.0f} | {tree / (1.5 * network.backward):.1%} | "
                  f"{1000 * ring:.0f} |")


def draw(network, path):
    """Draws the efficiency by ranks and hook."""
    width, height, left, right, top, bottom = 680, 320, 56, 130, 34, 44
    counts = [2**power for power in range(1, 11)]
    filled = buckets(resnet50())
    step = 1.5 * network.backward

    def x(ranks):
        return left + (math.log2(ranks) - 1) / 9 * (width - left - right)

    def y(share):
        return top + (1 - share) * (height - top - bottom)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
           'font-family="sans-serif" font-size="13" fill="#333">',
           f'<rect width="{width}" height="{height}" fill="#fff"/>',
           f'<text x="{left}" y="20" font-weight="bold">Modelled: share of a step that computes, '
           'ResNet-50 over a ring</text>']
    for percent in range(0, 101, 20):
        out.append(f'<path d="M{left} {y(percent / 100):.1f}H{width - right}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 8}" y="{y(percent / 100) + 4:.1f}" text-anchor="end">{percent} %</text>')
    for ranks in counts:
        out.append(f'<text x="{x(ranks):.1f}" y="{height - bottom + 18}" text-anchor="middle">{ranks}</text>')
    out.append(f'<text x="{(left + width - right) / 2}" y="{height - 8}" text-anchor="middle">ranks</text>')
    for (name, hook), color in zip(HOOKS.items(), ("#1668b3", "#c4501b", "#2e8540")):
        shares = [step / (step + network.exposed(ranks, filled, hook)[0]) for ranks in counts]
        path_ = " ".join(f"{x(ranks):.1f},{y(share):.1f}" for ranks, share in zip(counts, shares))
        out.append(f'<polyline points="{path_}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        out.append(f'<text x="{x(counts[-1]) + 8:.1f}" y="{y(shares[-1]) + 4:.1f}" fill="{color}">{name}</text>')
    out.append("</svg>")
    pathlib.Path(path).write_text("\n".join(out) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", type=float, default=1.25, help="of a rank, GB/s each way")
    parser.add_argument("--latency", type=float, default=50, help="of a message between neighbours, microseconds")
    parser.add_argument("--shared_memory", type=float, default=20,
                        help="of a step of a host's ranks, microseconds")
    parser.add_argument("--backward", type=float, default=0.5, help="seconds")
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 1024])
    parser.add_argument("--svg")
    arguments = parser.parse_args()
    network = Network(arguments)
    print(f"{arguments.bandwidth:g} GB/s, {arguments.latency:g} us a message, backward {arguments.backward:g} s\n")
    table(network, arguments.ranks)
    if arguments.svg:
        draw(network, arguments.svg)


if __name__ == "__main__":
    main()
