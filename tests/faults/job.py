"""Jobs into which scripts/fault-test injects faults, and helpers of its cases."""
import contextlib, datetime, json, os, re, resource, signal, socket, subprocess, sys, tempfile, time, zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RANKS = 4
# Counts steps, one every 20 ms, and writes its process ID to the folder; later attempts end at once. Its records have
# the layout of syncbn/agent.h.
WORKER = """
import os, struct, sys, time
rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
open(f"tmp{rank}", "w").write(str(os.getpid()))
os.rename(f"tmp{rank}", f"pid{os.environ.get('SYNCBN_ATTEMPT', attempt)}.{rank}")
if attempt != "0":
    sys.exit(0)
if "CHILD" in os.environ:
    import subprocess
    open(f"child{rank}", "w").write(str(subprocess.Popen(["sleep", "1000"]).pid))
fd = int(os.environ.get("SYNCBN_AGENT_FD", -1))
def report(kind, done, text=b""):
    record = struct.pack("<IHHiIQQQ216s", 0x4E425953, 1, kind, rank, 0, time.monotonic_ns(), done, 0, text)
    if fd >= 0:
        try: os.write(fd, record)
        except BlockingIOError: pass
for step in range(1, 100000):
    report(2, step)
    if step == int(os.environ.get("CRASH_AT", -1)) and rank == int(os.environ.get("CRASH_RANK", 1)):
        sys.exit(3)
    if step == int(os.environ.get("EAT_AT", -1)) and rank == 1:
        eaten = b"x" * (1 << 30)
    if step == int(os.environ.get("SKIP_AT", -1)):
        open(f"skipped{rank}", "w")
        if rank != int(os.environ["SKIP_RANK"]):
            time.sleep(1)  # the missing rank is then idle for longer than the waiting ones
            report(5, step, b"all_reduce")
        time.sleep(1000)
    time.sleep(0.02)
"""


class Failure(Exception):
    """A run did not go as docs/reliability.md promises."""


class Unavailable(Exception):
    """This machine lacks `need`, a name from scripts/run-tests, and so cannot run a case."""
    def __init__(self, what, need="netns"):
        super().__init__(what)
        self.need = need


# Exceptions that mean a failed run. All but Failure come from reading /proc and files of a job that goes wrong.
FAULTS = (Failure, OSError, ValueError, IndexError, subprocess.SubprocessError, zipfile.BadZipFile)

CASES = []
# Factor for all limits in seconds: --quick (`make test`) runs beside other tests.
PATIENCE = {"factor": 1}


def case(number, what, runs, torchrun=False, quick=False, deadline=lambda: 180):
    """Registers a function that takes a Job and the number of this run, and returns figures by name: seconds (a float), a
    count (an int), or text.

    `torchrun` is whether torchrun can run the case as well, `quick` whether `make test` runs it once, and `deadline`
    returns the number of seconds after which a run has failed.
    """
    def register(function):
        CASES.append((number, what, runs, torchrun, quick, deadline, function))
        return function
    return register


def check(condition, what):
    if not condition:
        raise Failure(what)


def wait_until(condition, seconds, what, period=0.005):
    seconds *= PATIENCE["factor"]
    begin = time.monotonic()
    while not condition():
        check(time.monotonic() - begin < seconds, f"{what} took more than {seconds} s")
        time.sleep(period)
    return time.monotonic() - begin


@contextlib.contextmanager
def deadline_of(seconds):
    """Ends the code in this context with a Failure after this time."""
    def pass_deadline(*_):
        raise Failure(f"the run was not over after {seconds} s")
    seconds = round(seconds * PATIENCE["factor"])
    signal.signal(signal.SIGALRM, pass_deadline)
    signal.alarm(seconds)
    try: yield
    finally: signal.alarm(0)


HELD = []


def free_port():
    """A port that no other program gets while this one runs, except listeners with SO_REUSEADDR."""
    HELD.append(socket.socket())
    HELD[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    HELD[-1].bind(("", 0))
    return HELD[-1].getsockname()[1]


def state_of(pid):
    """A letter as in ps; T is stopped, X is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "X"


def is_gone(pid):
    return state_of(pid) in "ZX"


LISTENS, CONNECTED = "0A", "01"  # states of sockets in /proc/net/tcp


def has_socket(pid, port, state):
    """Whether a process has a TCP socket in this state with the port at one end."""
    own = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try: own.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError: pass
    for name in ("tcp", "tcp6"):
        for line in open(f"/proc/{pid}/net/{name}").readlines()[1:]:
            fields = line.split()
            ports = [int(address.rsplit(":", 1)[1], 16) for address in fields[1:3]]
            if port in ports and fields[3] == state and f"socket:[{fields[9]}]" in own:
                return True
    return False


def child_of(pid):
    return int(open(f"/proc/{pid}/task/{pid}/children").read().split()[0])


def kill(pid, number):
    try: os.kill(pid, number)
    except ProcessLookupError: pass


def descendants(pid):
    """The process and all processes that it has started, directly or indirectly."""
    all, rest = [], [pid]
    while rest:
        one = rest.pop()
        all.append(one)
        try: rest += map(int, open(f"/proc/{one}/task/{one}/children").read().split())
        except OSError: pass
    return all


def cpu_seconds(pid):
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def check_does_not_spin(before):
    """Checks that children which ended since `before = children_seconds()` used at most 1 s of processor time."""
    computed = children_seconds() - before
    check(computed < PATIENCE["factor"], f"{computed:.2f} s of processor time")


def children_seconds():
    """Processor time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def memory_of(pid):
    """Resident memory in MiB."""
    return int(re.search(r"VmRSS:\s+(\d+)", open(f"/proc/{pid}/status").read())[1]) / 1024


def tensors_of(checkpoint):
    """The bytes of each tensor in a checkpoint: weights, optimizer, random numbers."""
    with zipfile.ZipFile(checkpoint) as file:
        return {name: file.read(name) for name in file.namelist() if "/data/" in name}


def time_of(event):
    """The time of an event log's line, in the form of time.time()."""
    return datetime.datetime.fromisoformat(event["time"].replace("Z", "+00:00")).timestamp()


class Job:
    """Launchers that run in their own folder."""

    def __init__(self, launcher, train):
        self.launcher, self.train_program = launcher, train
        self.temporary, self.programs, self.undo = tempfile.TemporaryDirectory(), [], []
        self.folder = self.temporary.name
        open(self.path("worker.py"), "w").write(WORKER)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def is_torchrun(self):
        return "torchrun" in self.launcher[0]

    def start(self, *options, program=(sys.executable, "worker.py"), env={}, limits=None, before=()):
        """Starts a launcher. `before` is a command that runs it, such as ip netns exec."""
        words = [*before, *self.launcher, *options]
        if self.is_torchrun():
            words += ["--no-python"]
        log = open(self.path(f"log{len(self.programs)}"), "w")
        one = subprocess.Popen([*words, *program], cwd=self.folder, stdout=log, stderr=log, preexec_fn=limits,
                               env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": self.folder, **env})
        self.programs.append(one)
        return one

    def train(self, *options, launcher=(), run="run", **more):
        """Starts a launcher whose workers train the digits. The folder may contain an earlier run."""
        config = os.path.join(ROOT, "configs", "digits.yaml")
        return self.start(*launcher, program=(self.train_program, "--config", config, "--run_dir", run, "--report=false",
                                              *options), **more)

    def log(self, index=0):
        with open(self.path(f"log{index}"), errors="replace") as file:
            return file.read()

    def events(self, path, event=None):
        """The lines of an event log, or only those of one event."""
        with open(self.path(path)) as file:
            all = [json.loads(line) for line in file]
        return [one for one in all if event in (None, one["event"])]

    def pids(self, attempt=0, ranks=RANKS, kind="pid{attempt}.{rank}", seconds=60):
        """Waits until the workers have started."""
        paths = [self.path(kind.format(attempt=attempt, rank=rank)) for rank in range(ranks)]
        are_there = lambda: all(os.path.exists(path) and os.path.getsize(path) for path in paths)
        wait_until(are_there, seconds, "the workers' start")
        return [int(open(path).read()) for path in paths]

    def wait(self, seconds=30, index=0):
        seconds *= PATIENCE["factor"]
        try:
            return self.programs[index].wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failure(f"the launcher still ran after {seconds} s: {self.log(index)[-500:]}") from None

    def end(self, expected, seconds=30, index=0):
        """Waits for a launcher's end."""
        code = self.wait(seconds, index)
        check(code == expected, f"exit code {code}, not {expected}: {self.log(index)[-500:]}")

    def end_all(self, expected, seconds=30):
        """Waits for the end of all launchers."""
        for index in range(len(self.programs)):
            self.end(expected, seconds, index)

    def complete(self, index=0, seconds=60):
        """Waits until a training run succeeds, as long as its output grows: other work may slow it down."""
        said, since = 0, time.monotonic()
        while self.programs[index].poll() is None:
            if len(self.log(index)) > said:
                said, since = len(self.log(index)), time.monotonic()
            check(time.monotonic() - since < seconds, f"no output for {seconds} s: {self.log(index)[-500:]}")
            time.sleep(0.02)
        self.end(0, index=index)

    def ours(self):
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{pid}/cwd") == self.folder and not is_gone(pid):
                    found.append(int(pid))
            except OSError:
                pass
        return found

    def keep(self):
        """Copies the folder and returns the path of the copy."""
        kept = tempfile.mkdtemp(prefix="syncbn-fault-")
        subprocess.run(["cp", "-a", f"{self.folder}/.", kept], stderr=subprocess.DEVNULL)
        return kept

    def clean(self):
        """Checks that no process in our folder is left 5 s after the launchers' end."""
        try:
            if all(one.poll() is not None for one in self.programs):
                wait_until(lambda: not self.ours(), 5, "the end of all processes")
        finally:
            for one in self.programs:
                one.poll() is None and one.kill()
            for pid in self.ours():
                kill(pid, signal.SIGKILL)
            wait_until(lambda: not self.ours(), 10, "killing what was left")
            while self.undo:
                self.undo.pop()()
            self.temporary.cleanup()


def names(text, rank):
    """Checks that one line names both the rank (a pattern) and the host."""
    check(re.search(rf"\brank {rank}\b.*\b{re.escape(socket.gethostname())}\b", text),
          f"no line names rank {rank} and host: {text[-500:]}")


def options(ranks=RANKS, *more):
    return (f"--nproc_per_node={ranks}", *more)


def nodes(rank, port, *more, count=2, address="127.0.0.1"):
    return (f"--nnodes={count}", f"--node_rank={rank}", f"--master_addr={address}", f"--master_port={port}", *more)


def needs_root(what):
    if os.geteuid() != 0:
        raise Unavailable(f"{what} needs root")


def system(*words):
    """Runs a system program such as ip or mount."""
    try: done = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError: raise Unavailable(f"no {words[0]}") from None
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
