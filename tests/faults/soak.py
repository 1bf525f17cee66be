"""Case 31: a training run of a given length under random faults, one a minute on average."""
import collections, glob, os, random, re, signal, statistics, subprocess, time

from cable import Cable
from job import *
from training_cases import OFTEN, check_no_temporaries, trainers

STEPS_OF_EPOCH = 91
SETTINGS = {"length": 3600}  # seconds that the run would take without faults
KINDS = (1, 3, 6, 9, 17, 18)
# Files that each start or failure adds: a launcher's output, TensorBoard's events, a flight record, an error file.
GROWING = r"log\d+$|events\.out|flight\.jsonl$|error_\d+\.json$|.*\.tmp$"
MEMORY = 16  # MiB that a launcher allocates once, when it first collects flight records
SAMPLES = 8  # fewer samples do not show growth
STALL = 180  # seconds without a new step: more than other work on the machine explains
OPTIONS = ("--max_restarts=1000", "--hang_timeout=5", "--rdzv_conf=keep_alive_interval=2,keep_alive_max_attempt=3")


class Soak:
    """Two nodes with one rank each. Like a service manager, restarts a launcher that ends with an error."""

    def __init__(self, job, cable, run, epochs):
        self.job, self.cable, self.run, self.epochs, self.port = job, cable, run, epochs, free_port()
        self.disk = job.path(run)
        os.mkdir(self.disk)
        system("mount", "-t", "tmpfs", "-o", "size=64m", "none", self.disk)
        job.undo.append(lambda: system("umount", self.disk))
        self.launchers, self.ended_at, self.starts = [None, None], [-1, -1], 0  # None: running
        self.step, self.target, self.behind_since = 0, 1, time.monotonic()
        self.moved_at = time.monotonic()
        self.lost, self.samples, self.sampled_at = 0.0, [], 0
        self.faults, self.random = collections.Counter(), random.Random(1)  # the cable uses the global one

    def start(self, host):
        self.launchers[host] = self.job.train(
            f"--epochs={self.epochs}", OFTEN, "--resume=auto", run=self.run, before=self.cable.on(host),
            launcher=nodes(host, self.port, *OPTIONS, address=self.cable.address(0)))
        self.ended_at[host] = None
        self.starts += 1

    def supervise(self):
        """Restarts launchers that have ended. Returns whether both nodes have ended with success."""
        codes = [one.poll() if one else 1 for one in self.launchers]
        if codes == [0, 0]:
            return True
        for host, code in enumerate(codes):
            if code is None:
                continue
            self.ended_at[host] = self.ended_at[host] or time.monotonic()
            if (code != 0 or codes[1 - host] not in (0, None)) and time.monotonic() - self.ended_at[host] > 1:
                self.start(host)
        return False

    def observe(self):
        """Reads the run's progress, and adds up the time in which it repeats steps or stands still."""
        try:
            with open(os.path.join(self.disk, "log.jsonl"), "rb") as file:
                file.seek(max(0, os.path.getsize(file.name) - 4096))
                step = max([self.step, *map(int, re.findall(rb'"step":(\d+)', file.read()))])
        except OSError:
            step = self.step
        now = time.monotonic()
        if step > self.step:
            self.step, self.moved_at = step, now
        if now - self.moved_at > STALL:
            raise Failure(f"no new step for {STALL} s, at step {self.step}, after {dict(self.faults)}: {self.state()}")
        if self.behind_since and self.step >= self.target:
            self.lost += now - self.behind_since
            self.behind_since = None
        # After two epochs, files of each kind exist.
        if not self.behind_since and now - self.sampled_at > 5 and self.step > 2 * STEPS_OF_EPOCH:
            self.sampled_at = now
            try: self.samples.append(self.sizes())
            except (OSError, TypeError, ValueError): pass  # a process is ending

    def state(self):
        """The last output of each launcher, and the status that it reports for the ranks."""
        texts = []
        for host, one in enumerate(self.launchers):
            texts.append(f"node {host}, exit code {one.poll()}:\n{self.job.log(self.job.programs.index(one))[-2000:]}")
            if one.poll() is None:
                status = subprocess.run([*self.job.launcher, "status", str(one.pid)], capture_output=True, text=True)
                texts.append(status.stdout + status.stderr)
        return "\n".join(texts)

    def sizes(self):
        """Memory in MiB and descriptors of launchers and ranks, and the number of files."""
        ranks = [pid for one in self.launchers for pid in trainers(one)]
        groups = {"launcher": [one.pid for one in self.launchers], "rank": ranks}
        sizes = {f"{name} MiB": max(map(memory_of, pids)) for name, pids in groups.items()}
        sizes.update({f"{name} descriptors": max(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
                      for name, pids in groups.items()})
        files = [name for _, _, names in os.walk(self.job.folder) for name in names]
        sizes["files"] = sum(not re.match(GROWING, name) for name in files)
        return sizes

    def watch(self, seconds, until=lambda: False):
        """Lets the job run. Returns whether it has ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            self.observe()
            if self.supervise():
                return True
            time.sleep(0.02)
        return False

    def ranks(self):
        self.watch(60, lambda: all(one and one.poll() is None and trainers(one) for one in self.launchers))
        return [pid for one in self.launchers for pid in trainers(one)]

    def inject(self, kind):
        ranks = self.ranks()
        if not ranks:
            return
        # A record is written every 10 steps, and one may be unread.
        self.target, self.behind_since = self.step + 20, self.behind_since or time.monotonic()
        self.faults[kind] += 1
        launcher = self.random.choice(self.launchers)
        if kind == 1:
            kill(self.random.choice(ranks), signal.SIGKILL)
        elif kind == 3:
            which = self.random.randrange(3)
            try: keeper = child_of(child_of(launcher.pid))
            except (OSError, IndexError): return  # the process is ending
            for pid in ([launcher.pid], [keeper], [keeper, launcher.pid])[which]:
                kill(pid, signal.SIGKILL)
        elif kind == 6:
            kill(self.random.choice(ranks), signal.SIGSTOP)
        elif kind == 9:
            self.cable.whole = False
            self.watch(10)
            self.cable.whole = True
        elif kind == 17:
            with open(os.path.join(self.disk, "filler"), "wb", buffering=0) as filler:
                try:
                    while True: filler.write(bytes(4096))
                except OSError: pass
            self.watch(5)
            os.remove(filler.name)
        elif kind == 18:
            self.watch(10, lambda: glob.glob(os.path.join(self.disk, "*.tmp")))
            for pid in [pid for one in self.launchers for pid in descendants(one.pid)]:
                kill(pid, signal.SIGKILL)


def growth(samples):
    """The medians of the first and of the last quarter, by name. Fails if one has grown."""
    if len(samples) < SAMPLES:
        return "too short a run to tell"
    quarter = len(samples) // 4
    texts = []
    for name in samples[0]:
        first, last = (statistics.median(one[name] for one in part) for part in (samples[:quarter], samples[-quarter:]))
        check(last <= first + (MEMORY if name.endswith("MiB") else 2), f"{name} grew from {first} to {last}")
        texts.append(f"{name} {first:.0f} → {last:.0f}")
    return ", ".join(texts)


@case("31", "Random faults of cases 1, 3, 6, 9, 17, 18, one a minute on average: same weights, nothing grows", runs=1,
      deadline=lambda: 900 + 6 * SETTINGS["length"])
def soak(job, run):
    needs_root("a network namespace")
    length = SETTINGS["length"]
    cable = Cable(job.folder, job.undo)
    probed = 6 if length > 60 else 2
    probe, begin = Soak(job, cable, "probe", probed), time.monotonic()
    while not probe.watch(60): pass
    epochs = max(1, round(probed * length / (time.monotonic() - begin)))

    soak, begin = Soak(job, cable, "run", epochs), time.monotonic()
    interval = min(60, max(10, length / 6))
    while not soak.watch(soak.random.expovariate(1 / interval)):
        soak.inject(soak.random.choice(KINDS))
    took = time.monotonic() - begin
    count = sum(soak.faults.values())
    check(count > 0, "no fault was injected")
    check_no_temporaries(job)
    damaged = [one for one in range(len(job.programs)) if "damaged" in job.log(one)]
    check(not damaged, f"a checkpoint was damaged: {job.log(damaged[0]) if damaged else ''}")
    job.train(f"--epochs={epochs}", OFTEN, launcher=("--nproc_per_node=2",), run="undisturbed")
    job.complete(len(job.programs) - 1)
    tensors, expected = (tensors_of(job.path(name, "last.pt")) for name in ("run", "undisturbed"))
    check(tensors == expected, f"other bits: {[name for name in expected if tensors.get(name) != expected[name]]}")
    sizes = growth(soak.samples)
    goodput = 1 - soak.lost / count / 600  # at one fault in 10 minutes
    check(goodput > 0.9 or length < 600, f"goodput {100 * goodput:.1f} % at one fault in 10 minutes")
    each = ", ".join(f"case {kind} {soak.faults[kind]}" for kind in sorted(soak.faults))
    return {"length": f"{took / 60:.1f} min, {epochs * STEPS_OF_EPOCH} steps",
            "faults": f"{count} ({each})", "launchers started": f"{soak.starts}",
            "goodput": f"{100 * (1 - soak.lost / took):.1f} %",
            "at one fault in 10 minutes": f"{100 * goodput:.1f} %",
            "sizes": sizes}
