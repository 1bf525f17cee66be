"""Jobs of one or more ranks that execute commands from their standard input."""

import json
import os
import socket
import subprocess
import sys

RANKS = 2


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Job:
    """The ranks of one side of a comparison."""

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
        """Sends a command to all ranks. Returns rank 0's answer."""
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
