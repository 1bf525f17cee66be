"""Faults of nodes and of the network between them."""
import os, re, signal, socket, time

from cable import Cable
from job import *

HEARTBEATS = "--rdzv_conf=keep_alive_interval=2,keep_alive_max_attempt=3"
STANDARD_ENDING = 15  # seconds until a job that has lost a node ends


def elastic(address, port, leads, *more):
    return ("--nnodes=1:2", "--rdzv_backend=c10d", f"--rdzv_endpoint={address}:{port}",
            f"{HEARTBEATS},is_host={int(leads)},last_call_timeout=1000", *more)


def start_two(job, cable=None, is_elastic=False, program=None):
    """Starts a job on two nodes with two workers each, on this machine or at both ends of a cable.

    With last_call_timeout, torchrun also waits for a second node after it has lost the first one.
    """
    port, more = free_port(), {"program": program} if program else {}
    for host in range(2):
        address = cable.address(0) if cable else "127.0.0.1"
        words = elastic(address, port, host == 0) if is_elastic else nodes(host, port, HEARTBEATS, address=address)
        words = [word.replace("timeout=1000", "timeout=1") if job.is_torchrun() else word for word in words]
        job.start(*words, "--nproc_per_node=2", *([] if job.is_torchrun() else [f"--local_addr=host{host}"]),
                  before=cable.on(host) if cable else (), **more)
    job.pids()


def kill_node(job, index):
    for pid in descendants(job.programs[index].pid):
        kill(pid, signal.SIGKILL)


@case("4", "All processes of one of two nodes are killed: the other ends", runs=10, torchrun=True, quick=True)
def killed_node(job, run):
    start_two(job)
    begin = time.monotonic()
    kill_node(job, 1)
    job.end(1 if job.is_torchrun() else 75, STANDARD_ENDING)
    ended = time.monotonic() - begin
    check(job.is_torchrun() or "node 1 (host1)" in job.log(), f"the node is not named: {job.log()}")
    return {"other ended": ended}


@case("4", "The same with --nnodes=1:2: the other goes on alone", runs=10, torchrun=True)
def killed_node_of_range(job, run):
    start_two(job, is_elastic=True)
    before = job.pids()
    begin = time.monotonic()
    kill_node(job, 1)
    if job.is_torchrun():  # torchrun does not count a lost node as a restart
        wait_until(lambda: all(pid not in before for pid in job.pids(ranks=2)), 60, "the start of others")
    else:
        job.pids(attempt=1, ranks=2, seconds=STANDARD_ENDING)
    again = time.monotonic() - begin
    if job.is_torchrun():
        return {"runs again": again}
    check("node 1 (host1) is lost" in job.log(), f"the node is not named: {job.log()}")
    check(job.programs[0].poll() is None, "the other node has ended")
    job.programs[0].terminate()
    job.end(143)
    return {"runs again": again}


@case("5", "All processes of the store's host are killed: the other ends, and names it", runs=10, torchrun=True, quick=True)
def killed_store(job, run):
    is_elastic = run % 2 == 1
    start_two(job, is_elastic=is_elastic)
    begin = time.monotonic()
    kill_node(job, 0)
    job.end(1 if job.is_torchrun() else 75, STANDARD_ENDING, index=1)
    ended = time.monotonic() - begin
    if job.is_torchrun():
        return {"other ended": ended}
    check(re.search(r"node 0 at 127.0.0.1:\d+ is gone", job.log(1)), f"node 0 is not named: {job.log(1)}")
    return {"other ended": ended}


@case("9", "The network is parted, heartbeats 2 s × 3: both sides stop", runs=3)
def partition(job, run):
    cable = Cable(job.folder, job.undo)
    start_two(job, cable)
    begin = time.monotonic()
    cable.whole = False
    job.end_all(75, STANDARD_ENDING)
    ended = time.monotonic() - begin
    check("node 1 (host1)" in job.log() and "node 0 at 10.78.0.1" in job.log(1), f"not named: {job.log()}{job.log(1)}")
    return {"both ended": ended}


@case("9", "The same with --nnodes=1:2: one side goes on, the other ends", runs=3)
def partition_of_range(job, run):
    cable = Cable(job.folder, job.undo)
    start_two(job, cable, is_elastic=True)
    begin = time.monotonic()
    cable.whole = False
    job.pids(attempt=1, ranks=2)
    again = time.monotonic() - begin
    job.end(75, STANDARD_ENDING, index=1)
    ended = time.monotonic() - begin
    cable.whole = True
    time.sleep(1)  # another owner would start its ranks within this time
    check(job.programs[0].poll() is None and not os.path.exists(job.path("pid2.0")), "the attempt has another owner")
    job.programs[0].terminate()
    job.end(143)
    return {"runs again": again, "other ended": ended}


@case("29", "The first address of the master's name, IPv6 or IPv4, swallows all packets: the next is tried after 2 s", runs=4,
      quick=True)
def dead_first_address(job, run):
    cable = Cable(job.folder, job.undo)
    system("ip", "-n", cable.names[1], "addr", "add", "fd78::2/64", "dev", "fault1")
    dead = ("fd78::9", "10.78.0.3")[run % 2]
    open(job.path("hosts"), "w").write(f"{dead} node0.test\n{cable.address(0)} node0.test\n")
    port, log = free_port(), "--event_log_handler=json:events"
    job.start(*nodes(0, port, address=cable.address(0)), program=["true"], before=cable.on(0))
    wait_until(lambda: has_socket(job.programs[0].pid, port, LISTENS), 30, "node 0's port")
    job.start(*nodes(1, port, log, address="node0.test"), program=["true"],
              before=(*cable.on(1), "sh", "-c", 'mount --bind hosts /etc/hosts && exec "$@"', "_"))
    job.end_all(0)
    joined = time_of(job.events("events", "attempt_started")[0]) - time_of(job.events("events", "job_started")[0])
    check(joined > 1.9, f"joined after {joined:.2f} s: another address came first")
    check(joined < 2 + PATIENCE["factor"], f"joined after {joined:.2f} s")
    return {"joined": joined}


@case("30", "A name server that does not answer: said", runs=2)
def silent_name_server(job, run):
    needs_root("another /etc/resolv.conf")
    open(job.path("resolv.conf"), "w").write("nameserver 127.0.0.77\n")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.77", 53))
        begin = time.monotonic()
        words = (nodes(1, free_port(), address="node0.example"),
                 ("--nnodes=1:2", "--rdzv_backend=c10d", "--rdzv_endpoint=node0.example:29400"))[run % 2]
        job.start(*words, program=["true"],
                  before=("unshare", "-m", "sh", "-c", 'mount --bind resolv.conf /etc/resolv.conf && exec "$@"', "_"))
        wait_until(lambda: "cannot find node0.example" in job.log(), 10, "saying so")
        said = time.monotonic() - begin
        job.programs[0].terminate()
        check(job.wait(12) in (143, -signal.SIGTERM), "another exit code")
    return {"said": said}
