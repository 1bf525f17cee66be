"""Jobs of several ranks that take turns on one machine, and what their times say. For the run.py of
bench/ddp and bench/syncbn."""

import json
import math
import os
import socket
import statistics
import subprocess
import sys

RANKS = 2


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Job:
    """The ranks of one side."""

    def __init__(self, command, ranks=RANKS):
        port = str(free_port())
        self.ranks = []
        for rank in range(ranks):
            environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank),
                               WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                               MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1")
            self.ranks.append(subprocess.Popen(command, env=environment, text=True,
                                               stdin=subprocess.PIPE, stdout=subprocess.PIPE))

    def ask(self, *words):
        """What rank 0 answers."""
        for process in self.ranks:
            print(*words, file=process.stdin, flush=True)
        answers = [process.stdout.readline() for process in self.ranks]
        if not all(answers):
            sys.exit(f"bench: a rank has ended: {' '.join(self.ranks[0].args)}")
        return json.loads(answers[0])

    def end(self):
        for process in self.ranks:
            process.stdin.close()
        for process in self.ranks:
            process.wait()


def median_and_interval(values):
    """The interval holds the median with at least 95 %, where there are enough values for that."""
    values = sorted(values)
    count, outside = len(values), 0
    for below in range(count // 2):
        tail = 2 * sum(math.comb(count, k) for k in range(below + 1)) / 2**count
        if tail > 0.05:
            break
        outside = below
    return statistics.median(values), values[outside], values[count - 1 - outside]


def by_turns(jobs, pairs, *words):
    """Answers of ours and of theirs; who is first changes from pair to pair."""
    answers = []
    for pair in range(pairs):
        order = jobs if pair % 2 == 0 else jobs[::-1]
        both = [job.ask(*words) for job in order]
        answers.append(both if pair % 2 == 0 else both[::-1])
    return answers
