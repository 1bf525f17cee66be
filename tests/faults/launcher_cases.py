"""Faults of processes and of user input, with workers that only count steps."""
import glob, json, os, random, re, resource, signal, socket, struct, subprocess, sys, time

from job import *


@case("1", "kill -9 of a rank at a random step: seen, and all start again", runs=100, torchrun=True)
def killed_rank(job, run):
    job.start(*options(RANKS, "--max_restarts=3"))
    pids = job.pids()
    time.sleep(random.uniform(0, 0.5))
    begin = time.monotonic()
    kill(pids[run % RANKS], signal.SIGKILL)
    others = [pid for pid in pids if pid != pids[run % RANKS]]
    wait_until(lambda: all(map(is_gone, others)), 1, "the others' end")
    seen = time.monotonic() - begin
    job.pids(attempt=1, seconds=5)
    again = time.monotonic() - begin
    job.end(0)
    if not job.is_torchrun():
        names(job.log(), run % RANKS)
    return {"others ended": seen, "all run again": again}


@case("3", "kill -9 of launcher, keeper or both: workers, their children and temporary folders are gone", runs=60,
      torchrun=True, quick=True)
def killed_launcher(job, run):
    launcher = job.start(*options(), env={"CHILD": "1"})
    everything = job.pids() + job.pids(kind="child{rank}")
    killed = [launcher.pid]
    if not job.is_torchrun():
        keeper = child_of(child_of(launcher.pid))  # the sentinel is between them
        killed = ([launcher.pid], [keeper], [keeper, launcher.pid])[run % 3]
    begin = time.monotonic()
    for pid in killed:
        kill(pid, signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, everything)), 2, "the end of workers and children")
    gone = time.monotonic() - begin
    if launcher.pid not in killed:
        job.end(75)
        check("keeper process" in job.log(), "the keeper is not named")
    launcher.wait(5)
    if not job.is_torchrun():
        wait_until(lambda: not glob.glob(job.path("syncbn-launch*")), 2, "removing the temporary folder")
    return {"all gone": gone}


@case("6", "SIGSTOP of a rank, --hang_timeout=2: named, ended, all start again", runs=20, torchrun=True)
def stopped_rank(job, run):
    job.start(*options(RANKS, "--max_restarts=1", *([] if job.is_torchrun() else ["--hang_timeout=2"])))
    pids = job.pids()
    time.sleep(0.2)  # until each rank has made a step
    begin = time.monotonic()
    kill(pids[run % RANKS], signal.SIGSTOP)
    wait_until(lambda: "holds up the others" in job.log(), 4, "naming the rank")
    named = time.monotonic() - begin
    job.end(0)
    check(re.search(rf"rank {run % RANKS} \(.*holds up the others.* is stopped \(SIGSTOP", job.log()),
          f"another is named: {job.log()}")
    names(job.log(), run % RANKS)
    return {"named": named}


@case("6", "SIGSTOP of a launcher of two, heartbeats 1 s × 2: the other ends", runs=20)
def stopped_launcher(job, run):
    port = free_port()
    for rank in range(2):
        job.start("--nnodes=2", f"--node_rank={rank}", "--master_addr=127.0.0.1", f"--master_port={port}",
                  "--rdzv_conf=keep_alive_interval=1,keep_alive_max_attempt=2")
    job.pids(ranks=2)
    begin = time.monotonic()
    kill(job.programs[run % 2].pid, signal.SIGSTOP)
    job.end(75, 15, index=1 - run % 2)
    ended = time.monotonic() - begin
    check(f"node {run % 2}" in job.log(1 - run % 2), "the node is not named")
    kill(job.programs[run % 2].pid, signal.SIGCONT)
    job.end(75, 15, index=run % 2)
    return {"other ended": ended}


@case("6", "SIGSTOP of a launcher of one node for twice --hang_timeout=2: the workers run on, then all goes on", runs=20)
def stopped_lone_launcher(job, run):
    launcher = job.start(*options(RANKS, "--max_restarts=1", "--hang_timeout=2"))
    pids = job.pids()
    status = [*job.launcher, "status", str(launcher.pid)]
    time.sleep(0.2)  # until each rank has made a step
    kill(launcher.pid, signal.SIGSTOP)
    time.sleep(4)
    check(subprocess.run(status, capture_output=True).returncode == 75, "the launcher answers")
    check(not any(state_of(pid) in "TZX" for pid in pids) and not job.log(), f"the workers do not run: {job.log()}")
    kill(launcher.pid, signal.SIGCONT)
    time.sleep(1)  # a false alarm would come within this time
    check(subprocess.run(status, capture_output=True).returncode == 0, "the launcher does not answer")
    check(not job.log() and not any(map(is_gone, pids)), f"something has happened: {job.log()}")
    kill(pids[run % RANKS], signal.SIGKILL)
    job.end(0)
    check("restart 1 of 1" in job.log(), job.log())
    return {}


@case("7", "SIGSTOP for 2 s of each rank, one after the other begins, --hang_timeout=5: no alarm", runs=13)
def short_stop(job, run):
    launcher = job.start(*options(RANKS, "--hang_timeout=5"))
    pids = job.pids()
    time.sleep(0.2)  # until each rank has made a step
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            kill(pid, number)
            time.sleep(2 / RANKS)
    time.sleep(0.5)  # a false alarm would come within this time
    check("holds up" not in job.log() and launcher.poll() is None, f"a false alarm: {job.log()}")
    launcher.terminate()
    job.end(143)
    return {"stops": RANKS}


@case("13", "The port is taken: named", runs=20, torchrun=True, quick=True)
def port_taken(job, run):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        begin = time.monotonic()
        job.start(f"--master_port={port}", program=["true"])
        job.end(1 if job.is_torchrun() else 75)
        named = time.monotonic() - begin
        check(re.search(rf"port:? {port}\b", job.log()), "the port is not named")
        check(named < PATIENCE["factor"] or job.is_torchrun(), f"named after {named:.2f} s")
    return {"named": named}


# In a network namespace with only two ephemeral ports, takes one and runs a program.
TWO_PORTS = """
import socket, subprocess, sys
open("/proc/sys/net/ipv4/ip_local_port_range", "w").write("40000 40001")
taken = socket.create_server(("", int(sys.argv[1])))
sys.exit(subprocess.call(sys.argv[2:]))
"""


@case("13", "Without --master_port, one of the two ports that the kernel offers is taken: the other", runs=20, quick=True)
def automatic_port_taken(job, run):
    needs_root("a network namespace")
    system("unshare", "-n", "true")
    taken, free = (40000, 40001)[::1 - 2 * (run % 2)]
    job.start(program=("sh", "-c", "echo port=$MASTER_PORT"),
              before=("unshare", "-n", sys.executable, "-c", TWO_PORTS, str(taken)))
    job.end(0)
    check(f"port={free}" in job.log(), f"not port {free}: {job.log()}")
    return {}


@case("15", "1,000 idle connections: a node joins, they are dropped after 10 s", runs=1)
def idle_connections(job, run):
    port = free_port()
    two = ("--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={port}")
    job.start(*two, "--node_rank=0")
    idle = []
    wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 10, "listening")
    for _ in range(1000):
        idle.append(socket.create_connection(("127.0.0.1", port)))
    begin = time.monotonic()
    job.start(*two, "--node_rank=1")
    job.pids(ranks=2)
    joined = time.monotonic() - begin
    check(joined < 6, f"the node joined after {joined:.1f} s")
    for one in idle:
        one.settimeout(15)
        check(one.recv(1) == b"", "an idle connection got an answer")
    dropped = time.monotonic() - begin
    job.programs[0].terminate()
    job.end_all(143)
    return {"node joined": joined, "all dropped": dropped}


def command_lines():
    """Those of all processes."""
    lines = b""
    for file in glob.glob("/proc/[0-9]*/cmdline"):
        try: lines += open(file, "rb").read()
        except OSError: pass  # it has ended
    return lines


@case("16", "A wrong, or no token: refused and logged; the job goes on", runs=5, quick=True)
def tokens(job, run):
    port, folder = free_port(), job.folder
    for name in ("right", "wrong"):
        path = os.path.join(folder, name)
        open(path, "w").write(f"{name}-0123456789abcdef\n")
        os.chmod(path, 0o600)
    two = ("--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={port}")
    job.start(*two, "--node_rank=0", "--token_file=right", program=["true"])
    job.start(*two, "--node_rank=1", "--token_file=wrong", program=["true"])
    job.end(2, index=1)
    job.start(*two, "--node_rank=1", program=["true"])
    job.end(2, index=2)
    check(b"0123456789abcdef" not in command_lines(), "a command line has the token")
    wait_until(lambda: job.log().count("refused a launcher at 127.0.0.1") == 2, 2, "logging both")
    begin = time.monotonic()
    job.start(*two, "--node_rank=1", "--token_file=right", program=["true"])
    job.end(0, index=3)
    job.end(0)
    took = time.monotonic() - begin
    check(not any("0123456789abcdef" in job.log(i) for i in range(4)), "a log has the token")
    return {"job with token": took}


@case("25", "64 file descriptors for 40 workers: a clear error", runs=3, quick=True)
def few_descriptors(job, run):
    begin, before = time.monotonic(), children_seconds()
    job.start("--nproc_per_node=40", limits=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))
    job.end(75)
    check("ulimit -n" in job.log(), f"the limit is not named: {job.log()}")
    named = time.monotonic() - begin
    check_does_not_spin(before)
    return {"named": named}


@case("25", "64 file descriptors, and 200 idle connections to node 0: it waits without spinning", runs=3, quick=True)
def few_descriptors_for_connections(job, run):
    port = free_port()
    launcher = job.start(*nodes(0, port), limits=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))
    wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 10, "listening")
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    before = cpu_seconds(launcher.pid)
    time.sleep(3)  # the span that is measured
    share = (cpu_seconds(launcher.pid) - before) / 3
    check(share < 0.1, f"node 0 takes {100 * share:.0f} % of a core")
    job.start(*nodes(1, port))
    job.pids(ranks=2)
    launcher.terminate()
    job.end_all(143)
    return {"connections": len(idle), "share of a core": f"{100 * share:.1f} %"}


def check_attempts(job, count):
    """Checks the attempts of a job that fails repeatedly, and the waits before them."""
    starts, ends = ([time_of(one) for one in job.events("events", name)] for name in ("attempt_started", "failure"))
    check(len(starts) == len(ends) == count, f"{len(starts)} attempts, not {count}: {job.log()}")
    for number, (end, start) in enumerate(zip(ends, starts[1:])):
        wait = min(30, 0.5 * 2 ** (number - 1)) if number > 0 else 0
        check(start - end > wait - 0.01, f"attempt {number + 1} began {start - end:.3f} s after a failure, not {wait} s")


@case("27", "A crash at the same step each time: back-off, early stop after 3", runs=3, quick=True)
def crash_at_one_step(job, run):
    begin = time.monotonic()
    script = "worker.py"
    text = open(os.path.join(job.folder, script)).read().replace('if attempt != "0":\n    sys.exit(0)\n', "")
    open(os.path.join(job.folder, script), "w").write(text)
    job.start(*options(2, "--max_restarts=50", "--event_log_handler=json:events"), env={"CRASH_AT": "1"})
    job.end(3)
    check("rank 1 failed (exit code 3) 3 times in a row at step 1" in job.log(), job.log()[-500:])
    check_attempts(job, 3)
    return {"stopped": time.monotonic() - begin}


@case("27", "A crash before the first step each time: back-off, early stop after 10", runs=1)
def crash_at_start(job, run):
    begin = time.monotonic()
    job.start(*options(2, "--max_restarts=50", "--event_log_handler=json:events"),
              program=("sh", "-c", "[ $RANK = 0 ] && exec sleep 1000; exit 3"))
    job.end(3, 150)
    check("rank 1 failed (exit code 3) 10 times in a row before its first step" in job.log(), job.log()[-500:])
    check_attempts(job, 10)
    return {"stopped": time.monotonic() - begin}


@case("29", "A master that drops all packets: said, and given up at the deadline", runs=1)
def dead_address(job, run):
    begin = time.monotonic()
    job.start("--nnodes=2", "--node_rank=1", "--master_addr=192.0.2.1", "--rdzv_conf=join_timeout=3", program=["true"])
    job.end(75)
    check("node 0 did not answer at 192.0.2.1" in job.log(), job.log())
    return {"given up (3 s)": time.monotonic() - begin}


@case("33", "--nproc_per_node=1000 by mistake: refused", runs=3, quick=True)
def oversubscribed(job, run):
    begin = time.monotonic()
    job.start("--nproc_per_node=1000", program=["true"])
    job.end(2)
    check("--oversubscribe" in job.log(), job.log())
    return {"refused": time.monotonic() - begin}


@case("6", "SIGSTOP of a keeper, --hang_timeout=2: continued, nothing starts again", runs=20)
def stopped_keeper(job, run):
    launcher = job.start(*options(RANKS, "--max_restarts=1", "--hang_timeout=2"))
    job.pids()
    time.sleep(0.2)  # until each rank has made a step
    begin = time.monotonic()
    kill(child_of(child_of(launcher.pid)), signal.SIGSTOP)
    wait_until(lambda: "was stopped; continuing it" in job.log(), 4, "naming the keeper")
    continued = time.monotonic() - begin
    check(launcher.poll() is None and not os.path.exists(job.path("pid1.0")), "the workers were started again")
    launcher.terminate()
    job.end(143)
    return {"continued": continued}


@case("8", "A rank does not come to a collective, --hang_timeout=2: named with the number", runs=8, quick=True)
def skipped_collective(job, run):
    rank = run % RANKS
    job.start(*options(RANKS, "--max_restarts=1", f"--hang_timeout={2 * PATIENCE['factor']}"),
              env={"SKIP_AT": "20", "SKIP_RANK": str(rank)})
    job.pids()
    wait_until(lambda: all(os.path.exists(job.path(f"skipped{one}")) for one in range(RANKS)), 10, "reaching the step")
    begin = time.monotonic()
    wait_until(lambda: "holds up the others" in job.log(), 3, "naming the rank")
    named = time.monotonic() - begin
    job.end(0)
    check(re.search(rf"rank {rank} \(.*holds up the others.*has not come to it.*collective 20 \(all_reduce\)", job.log()),
          f"the rank or the number is not named: {job.log()}")
    names(job.log(), rank)
    return {"named": named}


@case("8", "The same in a program of lib/dist: named with call and group", runs=4)
def skipped_call(job, run):
    worker = os.path.join(ROOT, "build", "tests", "waiting_worker")
    if not os.path.exists(worker):
        raise Unavailable(f"{worker} is not built", "libtorch")
    job.start(*options(3, "--hang_timeout=2"), program=(worker, ("skips", "sleeps")[run % 2]))
    expected = (r"rank 2 \(.*holds up the others.*rank 0 waits in all_reduce #\d+ of group '0' for rank 2",
                r"rank 2 \(.*holds up the others.*has not come to all_reduce #1 of group '1'")[run % 2]
    wait_until(lambda: re.search(expected, job.log()), 30, "naming the rank")
    said = time.time()
    job.end(137)
    names(job.log(), 2)
    [flight] = glob.glob(job.path("syncbn-launch-errors-*", "attempt_0", "flight.jsonl"))
    latest = [record["entries"][-1] for record in map(json.loads, open(flight)) if record.get("entries")]
    named = said - max(call["time_created_ns"] for call in latest if call["state"] == "started") / 1e9
    check(named < 3, f"named {named:.2f} s after the last rank's call")
    return {"named": named}


MESSAGES = 1_000_000


@case("14", "A million messages of nonsense each to the launchers' port, the store and the status socket, the second time "
      "of a job with a token: the job is undisturbed", runs=2, deadline=lambda: 3600)
def nonsense(job, run):
    port = free_port()
    # By default, the address sanitizer keeps 256 MiB of freed memory. Its own memory is a multiple of this number.
    environment = {"ASAN_OPTIONS": "quarantine_size_mb=1"}
    if run % 2:
        environment["SYNCBN_TOKEN"] = "right-0123456789abcdef"
    for rank in range(2):
        job.start(*nodes(rank, port), "--nproc_per_node=2", env=environment)
    pids = job.pids()
    time.sleep(0.5)  # until the launchers have done all for the start
    launcher = job.programs[0].pid
    before, descriptors = memory_of(launcher), len(os.listdir(f"/proc/{launcher}/fd"))
    begin = time.monotonic()
    greets = LAUNCHERS_MESSAGES if run % 2 == 0 else [TOKEN_GREETING, *LAUNCHERS_MESSAGES]
    connections = {f"connections to {name}": fuzz(address, messages, MESSAGES) for name, address, messages in (
        ("launchers", ("127.0.0.1", port), greets), ("store", ("127.0.0.1", port), QUERIES),
        ("status", f"\0syncbn-launch/{launcher}", LAUNCHERS_MESSAGES))}
    took = time.monotonic() - begin
    wait_until(lambda: len(os.listdir(f"/proc/{launcher}/fd")) <= descriptors, 15, "closing the connections")
    growth = memory_of(launcher) - before
    check(growth < 16, f"node 0 has grown by {growth:.1f} MiB")
    check("AddressSanitizer" not in job.log(), job.log())
    check(not any(map(is_gone, pids)) and all(one.poll() is None for one in job.programs), f"the job ended: {job.log()}")
    check(len(job.log().splitlines()) < 40, "node 0 says too much")
    job.programs[0].terminate()
    job.end_all(143)
    is_sanitized = b"__asan_init" in open(job.launcher[0], "rb").read()
    return {**({"built with": "AddressSanitizer"} if is_sanitized else {}), **connections,
            "more memory": f"{max(growth, 0):.1f} MiB", "sent in": took}


def query(number, *fields):
    return bytes([number]) + b"".join(
        struct.pack("<Q", one) if isinstance(one, int) else struct.pack("<Q", len(one)) + one for one in fields)


# One message of each kind that clients of the store and launchers send; first the greeting.
QUERIES = [b"\x00" + struct.pack("<I", 0x3C85F7CE), *(query(*one) for one in (
    (1, b"/a", b"1"), (2, b"/a", b"1", b"2"), (3, b"/a"), (4, b"/b", 7), (5, 1, b"/a"), (6, 1, b"/c"), (7,), (8, b"/a"),
    (9, b"/a", b"x"), (10, 2, b"/a", b"/b"), (11, 1, b"/a", b"1"), (12,), (14, b"/q", b"1"), (15, b"/q"), (16, b"/q"),
    (17,), (18, b"/bar", 4)))]
TOKEN_GREETING = b"syncbn-agent 6 token " + b"0" * 64 + b"\n"
LAUNCHERS_MESSAGES = [b"syncbn-agent 6\n", *(json.dumps(one).encode() + b"\n" for one in (
    {"type": "hello", "job": "none", "node": 1, "leads": False, "nodes": "2", "nproc": 2, "role": "default", "host": "x",
     "max_restarts": 0, "what": "", "exit_code": 0, "addresses": []},
    {"type": "failed", "attempt": 0, "exit_code": 1, "may_restart": True, "rank": 1, "status": 256, "what": "x",
     "step": 3},
    {"type": "end", "exit_code": 1, "what": "x"}, {"type": "ended", "attempt": 0}, {"type": "leave"}, {"type": "alive"},
    {"type": "workers", "workers": [{"rank": 0}]}, {"type": "stalled", "attempt": 0, "seconds": 3.5, "ends": True})),
    TOKEN_GREETING, b"proof " + b"0" * 64 + b"\n"]


def damaged(message):
    """The message with some bytes changed, removed or added; three out of four stay as they are."""
    message = bytearray(message)
    for _ in range(random.choice((*[0] * 9, 1, 2, 8))):
        at = random.randrange(len(message))
        message[at:at + random.choice((0, 1, 1, 4))] = random.randbytes(random.choice((0, 1, 1, 8)))
        message = message or bytearray(b"x")
    return message


def fuzz(address, messages, count):
    """Sends `count` messages: in each connection first the greeting, then others. A damaged one is the connection's
    last, because messages after it might not be read. The status socket, which reads nothing, gets a hundred per
    connection.

    Returns the number of connections.
    """
    sent = connections = 0
    is_status = isinstance(address, str)
    while sent < count:
        with socket.socket(socket.AF_UNIX if is_status else socket.AF_INET) as one:
            one.settimeout(5)
            try: one.connect(address)
            except BlockingIOError: continue  # the status socket has too many connections at present
            connections += 1
            for number in range(100):
                message = random.choice(messages) if number else messages[0]
                bytes_sent = damaged(message)
                try: one.sendall(bytes_sent)
                except OSError: break  # closed: a launcher or the store has refused an earlier message
                sent += 1
                if bytes_sent != message and not is_status: break
    return connections


@case("24", "The kernel kills a rank for lack of memory (a control group of 200 MiB): said, and all end within 5 s", runs=3)
def out_of_memory(job, run):
    needs_root("a control group")
    group = f"/sys/fs/cgroup/memory/syncbn-fault-{os.getpid()}"
    try:
        os.mkdir(group)
        job.undo.append(lambda: wait_until(lambda: not removes(group), 5, "removing the control group"))
        open(f"{group}/memory.limit_in_bytes", "w").write(str(200 << 20))
    except OSError as error:
        raise Unavailable(f"{group}: {error.strerror}", "cgroup") from None
    job.start(*options(), env={"EAT_AT": "10"}, limits=lambda: open(f"{group}/cgroup.procs", "w").write(str(os.getpid())))
    pid = job.pids()[1]
    wait_until(lambda: is_gone(pid), 20, "the kill")
    begin = time.monotonic()
    wait_until(lambda: "out of memory" in job.log(), 2, "saying so")
    said = time.monotonic() - begin
    job.end(137, 5)
    names(job.log(), 1)
    return {"said": said}


def removes(folder):
    """Tries to remove a control group. Returns whether it still exists."""
    try: os.rmdir(folder)
    except OSError: pass
    return os.path.exists(folder)


CROWDED = 600  # seconds


@case("26", "64 ranks on few cores for 10 minutes, --hang_timeout=5: no alarm", runs=1, deadline=lambda: CROWDED + 120)
def many_ranks(job, run):
    launcher = job.start(*options(64, "--hang_timeout=5", "--oversubscribe"))
    job.pids(ranks=64)
    before = cpu_seconds(launcher.pid)
    time.sleep(CROWDED)
    share = (cpu_seconds(launcher.pid) - before) / CROWDED
    check("no progress" not in job.log() and launcher.poll() is None, f"a false alarm: {job.log()}")
    launcher.terminate()
    job.end(143)
    return {"launcher's share of a core": f"{100 * share:.1f} %"}


@case("28", "Launchers that differ in --nnodes, --max_restarts, --rdzv_id or version: refused, with the difference",
      runs=4, quick=True)
def other_options(job, run):
    port = free_port()
    differing, named = ((("--nnodes=3",), "--nnodes=3, and node 0 with --nnodes=2"),
                        (("--max_restarts=4",), "--max_restarts=4, and node 0 with --max_restarts=0"),
                        (("--rdzv_id=other",), "belongs to job 'other' (--rdzv_id)"), ((), "different versions"))[run % 4]
    job.start(*nodes(0, port), program=["true"])
    begin = time.monotonic()
    if differing:
        job.start(*nodes(1, port), *differing, program=["true"])
        job.end(2, index=1)
        check(named in job.log(1), f"the difference is not named: {job.log(1)}")
        refused = time.monotonic() - begin
    else:
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 10, "listening")
        with socket.create_connection(("127.0.0.1", port)) as old:
            old.sendall(b"syncbn-agent 1\n")
            old.settimeout(5)
            check(named.encode() in old.recv(4096), "another version is not refused")
        refused = time.monotonic() - begin
    wait_until(lambda: named in job.log(), 2, "node 0's line")
    job.start(*nodes(1, port), program=["true"])
    job.end(0)
    return {"refused": refused}


# Shifts the time of day that a process reads.
SHIFTED_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec* time) {
  int (*real)(clockid_t, struct timespec*) = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, time);
  if (clock == CLOCK_REALTIME) time->tv_sec += 3600;
  return result;
}
"""


@case("28", "A node with its clock an hour ahead: no difference", runs=2)
def other_clock(job, run):
    open(job.path("clock.c"), "w").write(SHIFTED_CLOCK)
    try: subprocess.run(["cc", "-shared", "-fPIC", "-o", job.path("clock.so"), job.path("clock.c")], check=True)
    except FileNotFoundError: raise Unavailable("no C compiler", "cc") from None
    port = free_port()
    for rank in range(2):
        shifted = {"LD_PRELOAD": job.path("clock.so")} if rank == run % 2 else {}
        job.start(*nodes(rank, port, "--max_restarts=1"), "--nproc_per_node=2", "--hang_timeout=2",
                  env={"CRASH_AT": "100", "CRASH_RANK": "3", **shifted})
    job.end_all(0)
    check(os.path.exists(job.path("pid1.3")) and "no progress" not in job.log(), f"another end: {job.log()}")
    return {}


def start_launchers(job, launchers, workers):
    """The launchers have to join within 5 s of the last one's start, and to end within 5 s of a signal to node 0. The
    start of all workers may take longer: the cores of one machine start the workers of all nodes."""
    needs_root("a control group")
    if int(re.search(r"MemAvailable:\s+(\d+)", open("/proc/meminfo").read())[1]) < 8 << 20:
        raise Unavailable("less than 8 GiB of memory are free", "memory")
    group = f"/sys/fs/cgroup/pids/syncbn-fault-{os.getpid()}-{workers}"
    try: os.mkdir(group)
    except OSError as error: raise Unavailable(f"{group}: {error.strerror}", "cgroup") from None
    processes = lambda: int(open(f"{group}/pids.current").read())
    job.undo.append(lambda: (wait_until(lambda: processes() == 0, 60, "the end of all processes"), os.rmdir(group)))
    port, enter = free_port(), lambda: open(f"{group}/cgroup.procs", "w").write(str(os.getpid()))

    def enter_as_node_0():  # whose cores do not start the workers of the others
        enter()
        os.nice(-10)

    for rank in range(launchers):
        log = [f"--event_log_handler=json:{job.path('events')}"] if rank == 0 else []
        job.start(*nodes(rank, port, count=launchers), f"--nproc_per_node={workers}", *log, program=("sleep", "1000"),
                  limits=enter_as_node_0 if rank == 0 else enter)
    begin, begin_by_calendar = time.monotonic(), time.time()
    launcher = job.programs[0]
    # Use the event's own time: node 0 may write it late, when it waits for a core behind nodes that start workers.
    wait_until(lambda: "nodes_joined" in open(job.path("events")).read(), 60, "the last node to join")
    joined = time_of(job.events("events", "nodes_joined")[0]) - begin_by_calendar
    # Each launcher has a sentinel and a keeper.
    expected = launchers * (3 + workers)
    try: wait_until(lambda: processes() == expected, 60, "the start of all workers")
    except Failure as error:
        ended = sum(program.poll() is not None for program in job.programs)
        raise Failure(f"{error}: {processes():,} of {expected:,} processes, {ended} launchers have ended") from None
    all_run = time.monotonic() - begin
    memory, descriptors = memory_of(launcher.pid), len(os.listdir(f"/proc/{launcher.pid}/fd"))
    computed = int(open(f"/proc/{launcher.pid}/schedstat").read().split()[0]) / 1e9
    node_0 = f"{memory:.1f} MiB, {descriptors} descriptors, {computed:.1f} s of processor time until then"
    begin = time.monotonic()
    launcher.terminate()
    job.end_all(143, 60)
    wait_until(lambda: processes() == 0, 60, "the end of all workers")
    ended = time.monotonic() - begin
    figures = f"joined after {joined:.1f} s, all workers ran after {all_run:.1f} s, ended after {ended:.1f} s, node 0 with {node_0}"
    check(max(joined, ended) < 5, figures)
    return {"joined": joined, "all workers run": all_run, "all ended": ended, "node 0": node_0}


@case("32", "1,000 launchers with a worker each: they join, and end, within 5 s", runs=1, deadline=lambda: 300)
def many_launchers(job, run):
    return start_launchers(job, 1000, workers=1)


@case("32", "1,000 launchers with 8 workers each: they join, and end, within 5 s", runs=1, deadline=lambda: 300)
def many_workers(job, run):
    return start_launchers(job, 1000, workers=8)
