#!/usr/bin/env python3
"""What synchronising a batch norm layer costs over many hosts: up the tree, around a ring, and as modelled.

  bench/ddp/measure_tree.py [--hosts 4x8 8x8 16x8 32x1 64x1 128x1] [--delay 20] [--channels 64] [--calls 3]
                            [--worker build/bench/tree_cost]

16x8 is 16 hosts of eight ranks. Hosts are network and PID namespaces, whose ranks share memory with each other
only. This process is the network between them: it reads each packet from one host and writes it to another --delay
milliseconds later. The model (scaling_model.py) gets the time of a message, and of an exchange within a host, that
the same ranks measured. Prints the table of docs/scaling.md. Needs root.
"""

import argparse
import collections
import fcntl
import json
import os
import pathlib
import select
import shlex
import struct
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from pairs import ROOT  # noqa: E402
from scaling_model import Network, norm_hops  # noqa: E402

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
PATIENCE = 250  # seconds


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True)


def address(host):
    return f"10.78.{host // 250}.{host % 250 + 1}"


class Hosts:
    """Namespaces, and a thread that forwards packets between them after a delay."""

    def __init__(self, count, delay):
        self.delay = delay
        self.names = [f"syncbn-tree-{host}" for host in range(count)]
        self.cables = []
        self.stopped = False
        for host, name in enumerate(self.names):
            ip("netns", "add", name)
            self.cables.append(self.plug_in(host, name))
        self.thread = threading.Thread(target=self.pass_packets_on)
        self.thread.start()

    @staticmethod
    def plug_in(host, name):
        """Makes a TUN device in the host's namespace. Returns this process's end."""
        cable = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        device = f"syncbn{host}"
        fcntl.ioctl(cable, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
        ip("link", "set", device, "mtu", MTU, "netns", name)
        ip("-n", name, "addr", "add", f"{address(host)}/16", "dev", device)
        ip("-n", name, "link", "set", device, "up")
        ip("-n", name, "link", "set", "lo", "up")
        return cable

    def pass_packets_on(self):
        # This thread stands in for a network, but all ranks share the processors with it.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        poll = select.epoll()
        for cable in self.cables:
            poll.register(cable, select.EPOLLIN)
        under_way = collections.deque()  # (when to deliver, host, packet)
        while not self.stopped:
            wait = max(0, under_way[0][0] - time.monotonic()) if under_way else 0.1
            for cable, _ in poll.poll(wait):
                packet = os.read(cable, MTU)
                if packet[0] >> 4 == 4:  # the others are IPv6 announcements
                    host = 250 * packet[18] + packet[19] - 1  # the last bytes of the destination
                    under_way.append((time.monotonic() + self.delay, host, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, host, packet = under_way.popleft()
                os.write(self.cables[host], packet)

    def close(self):
        self.stopped = True
        self.thread.join()
        for cable, name in zip(self.cables, self.names):
            os.close(cable)
            ip("netns", "delete", name)

    def run(self, ranks_of_a_host, command):
        """Runs the command on all ranks. Returns what rank 0 printed."""
        world = len(self.names) * ranks_of_a_host
        environment = dict(os.environ, WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(ranks_of_a_host),
                           MASTER_ADDR=address(0), MASTER_PORT="29500", OMP_NUM_THREADS="1")
        environment.pop("GLOO_SOCKET_IFNAME", None)
        processes = []
        for host, name in enumerate(self.names):
            first = host * ranks_of_a_host
            start_all = (f"for i in $(seq 0 {ranks_of_a_host - 1}); do "
                         f"RANK=$(({first} + i)) LOCAL_RANK=$i {shlex.join(command)} & done; wait")
            inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", start_all]
            processes.append(subprocess.Popen(["ip", "netns", "exec", name, *inside], env=environment, text=True,
                                              stdout=subprocess.PIPE))
        try:
            out = processes[0].communicate(timeout=PATIENCE)[0]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if not out:
            sys.exit("measure_tree: the ranks have failed")
        return json.loads(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="*", default=["4x8", "8x8", "16x8", "32x1", "64x1", "128x1"])
    parser.add_argument("--delay", type=float, default=20, help="milliseconds")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--worker", default=str(ROOT / "build/bench/tree_cost"))
    arguments = parser.parse_args()
    print("| ranks | hosts | hops between hosts | message, ms | within a host, ms | tree, ms | modelled | "
          "ring, ms | modelled | ring / tree |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for shape in arguments.hosts:
        count, ranks = map(int, shape.split("x"))
        hosts = Hosts(count, arguments.delay / 1000)
        try:
            took = hosts.run(ranks, [arguments.worker, str(arguments.channels), str(arguments.calls), str(ranks)])
        finally:
            hosts.close()
        model = Network(argparse.Namespace(latency=1e6 * took["message"], shared_memory=1e6 * took["within"],
                                           bandwidth=1.25, backward=0))
        modelled = [model.norm_exchange(count, ranks, arguments.channels, ring) for ring in (False, True)]
        cells = [took["message"], took["within"], took["tree"], modelled[0], took["ring"], modelled[1]]
        print(f"| {count * ranks} | {count} | {norm_hops(count, ranks)} | "
              + " | ".join(f"{1000 * cell:.1f}" for cell in cells) + f" | {took['ring'] / took['tree']:.1f} |",
              flush=True)


if __name__ == "__main__":
    main()
