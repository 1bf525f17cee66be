"""Faults of jobs that train the digits: a disturbed run has to end with the same bits as an undisturbed one."""
import functools, glob, json, os, random, re, shutil, signal, subprocess, time

from cable import Cable
from job import *
from network_cases import HEARTBEATS

TWO = ("--nproc_per_node=2",)
EPOCHS = "--epochs=6"
OFTEN = "--checkpoint.every=20step"
ALWAYS = "--checkpoint.every=1step"


@functools.lru_cache(maxsize=None)
def undisturbed(launcher, train, ranks, *more):
    """The tensors at the end of an undisturbed run."""
    job = Job([launcher], train)
    try:
        job.train(EPOCHS, *more, launcher=options(ranks))
        job.complete()
        return tensors_of(job.path("run", "last.pt"))
    finally:
        job.clean()


def check_bits(job, *more, run="run", ranks=2):
    tensors, expected = tensors_of(job.path(run, "last.pt")), undisturbed(job.launcher[0], job.train_program, ranks, *more)
    differing = [name for name in expected if tensors.get(name) != expected[name]]
    check(not differing and len(tensors) == len(expected), f"other bits than undisturbed: {differing}")


def trainers(launcher):
    """The processes of the ranks."""
    found = []
    for pid in descendants(launcher.pid):
        try:
            with open(f"/proc/{pid}/comm") as file:
                found += [pid] if file.read() == "train\n" else []
        except OSError:
            pass
    return found


def process_of(launcher, rank):
    """Waits for a rank."""
    found = []  # the first result counts: during exec the process has another name
    def look():
        found[:] = [pid for pid in trainers(launcher) if is_rank(pid, rank)]
        return found
    wait_until(look, 60, f"the start of rank {rank}")
    return found[0]


def wait_for_checkpoint(job, run="run"):
    wait_until(lambda: os.path.exists(job.path(run, "last.pt")), 60, "the first checkpoint")


def trains_again(job, run="run"):
    """Whether the log has a step after its second start."""
    starts = open(job.path(run, "log.jsonl")).read().split('"event":"start"')
    return len(starts) > 2 and '"event":"step"' in starts[-1]


def temporaries(job, run="run"):
    return [name for name in os.listdir(job.path(run)) if name.endswith(".tmp")]


def check_no_temporaries(job, run="run"):
    check(not temporaries(job, run), f"temporary files are left: {temporaries(job, run)}")


def saves(job):
    """The temporary files of checkpoints that are being written."""
    return [name for name in temporaries(job) if name.startswith((".last.pt.", ".best.pt."))]


def wait_for_save(job):
    """Waits until a save begins. Returns a random time, at most the duration of the previous save."""
    wait = lambda begins, what: wait_until(lambda: bool(saves(job)) == begins, 60, what, period=0.0002)
    for begins in (False, True):
        wait(begins, "a save")
    length = wait(False, "the end of a save")
    wait(True, "the next save")
    return random.uniform(0, length)


def kill_in_save(job, pids):
    """Kills processes, rank 0 first, at a random time during a save. Returns whether the save had not ended."""
    time.sleep(wait_for_save(job))
    for pid in pids:
        kill(pid, signal.SIGKILL)
    wait_until(lambda: is_gone(pids[0]), 5, "the end of rank 0")
    return bool(saves(job))


def resume_to_end(job):
    job.train(EPOCHS, OFTEN, "--resume=auto", launcher=TWO)
    job.complete(len(job.programs) - 1)


@case("1", "kill -9 of a rank of a training run: the final weights are those of an undisturbed run", runs=100)
def killed_rank_of_training(job, run):
    launcher = job.train(EPOCHS, OFTEN, launcher=options(RANKS, "--max_restarts=1"))
    wait_for_checkpoint(job)
    time.sleep(random.uniform(0, 0.5))  # at any time of the run
    begin = time.monotonic()
    kill(process_of(launcher, run % RANKS), signal.SIGKILL)
    wait_until(lambda: trains_again(job), 5, "the first step after the restart")
    again = time.monotonic() - begin
    job.complete()
    names(job.log(), run % RANKS)
    check("exit code 85" not in job.log(), f"another rank claims to have saved: {job.log()[-500:]}")
    check_bits(job, ranks=RANKS)
    return {"trains again": again}


@case("2", "kill -9 of a rank inside the rendezvous, for which the other has not come: starts again, same weights", runs=20)
def killed_in_rendezvous(job, run):
    launcher = job.train(EPOCHS, OFTEN, launcher=(*TWO, "--max_restarts=1"))
    ranks = [process_of(launcher, rank) for rank in range(2)]
    kill(ranks[1], signal.SIGSTOP)
    port = int(re.search(rb"\0MASTER_PORT=(\d+)\0", open(f"/proc/{ranks[0]}/environ", "rb").read())[1])
    wait_until(lambda: has_socket(ranks[0], port, LISTENS), 60, "rank 0's store")
    if run % 2 == 1:
        kill(ranks[0], signal.SIGSTOP)
        kill(ranks[1], signal.SIGCONT)
        wait_until(lambda: has_socket(ranks[1], port, CONNECTED), 60, "rank 1's connection to the store")
    time.sleep(random.uniform(0, 0.3))  # at any time of the wait
    kill(ranks[run % 2], signal.SIGKILL)
    kill(ranks[1 - run % 2], signal.SIGCONT)
    job.complete()
    names(job.log(), run % 2)
    check("restart 1 of 1" in job.log(), f"not started again: {job.log()[-500:]}")
    check_bits(job)
    return {}


@case("2", "kill -9 of rank 0 during a save: resumes, same weights, no temporary file is left", runs=20)
def killed_in_save(job, run):
    launcher = job.train(EPOCHS, ALWAYS, launcher=(*TWO, "--max_restarts=20"))
    wait_for_checkpoint(job)
    time.sleep(random.uniform(0, 0.3))  # so that the first kill comes in another save each time
    hit, missed = False, -1
    while not hit:
        missed += 1
        wait_until(lambda: job.log().count("writes to run") > missed, 60, "the start")
        hit = kill_in_save(job, [process_of(launcher, 0)])
    job.complete()
    names(job.log(), 0)
    check_no_temporaries(job)
    check_bits(job)
    return {"kills that missed a save": missed}


@case("2", "kill -9 of a rank inside backward, as its flight record shows: starts again, same weights", runs=20,
      deadline=lambda: 600)
def killed_in_backward(job, run):
    for kills in range(1, 20):
        name = f"run{kills}"
        launcher = job.train(EPOCHS, OFTEN, run=name,
                             launcher=(*TWO, "--max_restarts=1", f"--log_dir={job.path(name)}-logs"))
        wait_for_checkpoint(job, name)
        time.sleep(random.uniform(0, 0.5))  # at any time of a step
        rank = run % 2
        kill(process_of(launcher, rank), signal.SIGKILL)
        job.complete(kills - 1)
        names(job.log(kills - 1), rank)
        check_bits(job, run=name)
        if was_in_backward(job.path(f"{name}-logs"), rank):
            return {"kills": kills}
    raise Failure("19 kills at random times hit no backward pass")


def was_in_backward(logs, rank):
    """Whether the rank's last exchange was a layer's in backward, or an unfinished one of gradients.

    Backward sends two sums per channel and three more numbers, forward two sums and four more numbers.
    """
    [path] = glob.glob(os.path.join(logs, "*", "attempt_0", "flight.jsonl"))
    for line in open(path):
        record = json.loads(line)
        if record.get("rank") == rank and record.get("entries"):
            last = record["entries"][-1]
            channels = re.match(r"SyncBatchNorm layer '.*' \((\d+) channels", last["name"])
            if channels:
                return last["input_sizes"][0][-1] == 2 * int(channels[1]) + 3
            return last["kind"] == "all_reduce" and last["input_dtypes"] == ["Float"] and last["state"] != "completed"
    raise Failure(f"{path} does not have rank {rank}")


def is_rank(pid, rank):
    try: return f"RANK={rank}".encode() in open(f"/proc/{pid}/environ", "rb").read().split(b"\0")
    except OSError: return False


def train_over(job, cable, *more, options=()):
    port = free_port()
    for host in range(2):
        job.train(*more, launcher=nodes(host, port, *options, address=cable.address(0)), before=cable.on(host))


def complete_both(job):
    for host in range(2):
        job.complete(host)


@case("9", "The network between two nodes that train is away for 10 s, heartbeats 2 s × 3: both sides stop; resumed, same weights",
      runs=5)
def partition_of_training(job, run):
    cable = Cable(job.folder, job.undo)
    train_over(job, cable, EPOCHS, OFTEN, options=[HEARTBEATS])
    wait_for_checkpoint(job)
    ranks = [pid for one in job.programs for pid in trainers(one)]
    begin = time.monotonic()
    cable.whole = False
    time.sleep(10)
    cable.whole = True
    job.end_all(75, 10)
    ended = time.monotonic() - begin
    check(all(map(is_gone, ranks)), "a rank runs on")
    train_over(job, cable, EPOCHS, OFTEN, "--resume=auto")
    for host in range(2, 4):
        job.complete(host)
    check_bits(job)
    return {"both ended": ended}


@case("10", "The network between two nodes is away for 2 s: training goes on, same weights", runs=3)
def short_outage(job, run):
    cable = Cable(job.folder, job.undo)
    train_over(job, cable, EPOCHS, OFTEN)
    wait_for_checkpoint(job)
    cable.whole = False
    time.sleep(2)
    cable.whole = True
    check(cable.lost > 0, "the run had ended before")
    begin = time.monotonic()
    complete_both(job)
    check_bits(job)
    return {"to the end": time.monotonic() - begin}


@case("11", "5 % of the packets between two nodes are lost: same weights", runs=1, deadline=lambda: 600)
def lossy_network(job, run):
    cable = Cable(job.folder, job.undo)
    cable.loss = 0.05
    train_over(job, cable, EPOCHS, "--max_steps=60")
    complete_both(job)
    check_bits(job, "--max_steps=60")
    check(cable.lost > 0, "no packet was lost")
    return {"lost": f"{cable.lost} of {cable.packets} packets"}


@case("12", "Packets between two nodes take 100 ms: same weights", runs=1, deadline=lambda: 600)
def slow_network(job, run):
    cable = Cable(job.folder, job.undo)
    cable.delay = 0.1
    train_over(job, cable, EPOCHS, "--max_steps=20")
    complete_both(job)
    check_bits(job, "--max_steps=20")
    times = {record["step"]: record["time"] for record in map(json.loads, open(job.path("run", "log.jsonl")))
             if record["event"] == "step"}
    step = (times[20] - times[10]) / 10
    check(step > cable.delay, f"a step took {step:.3f} s, so its packets did not wait")
    return {"a step": step, "packets": cable.packets}


@case("17", "The disk is full during a save: code 75; the last checkpoint has the same bytes, and the run resumes from it",
      runs=10)
def full_disk(job, run):
    needs_root("a small disk")
    disk = job.path("run")
    os.mkdir(disk)
    system("mount", "-t", "tmpfs", "-o", "size=4m", "none", disk)
    job.undo.append(lambda: system("umount", disk))
    launcher = job.train(EPOCHS, OFTEN, launcher=TWO)
    wait_for_checkpoint(job)
    ranks = trainers(launcher)
    stop_between_saves(job, ranks)
    with open(os.path.join(disk, "filler"), "wb", buffering=0) as filler:
        try:
            while True: filler.write(b"x" * 4096)
        except OSError: pass
    before = open(os.path.join(disk, "last.pt"), "rb").read()
    for pid in ranks:
        kill(pid, signal.SIGCONT)
    job.end(75, 60)
    check(open(os.path.join(disk, "last.pt"), "rb").read() == before, "the last checkpoint has changed")
    names(job.log(), 0)
    check("No space left on device" in job.log(), f"the reason is not named: {job.log()[-500:]}")
    check_no_temporaries(job)
    os.remove(os.path.join(disk, "filler"))
    resume_to_end(job)
    check_bits(job)
    return {}


def stop_between_saves(job, ranks):
    while True:
        for pid in ranks:
            kill(pid, signal.SIGSTOP)
        wait_until(lambda: all(state_of(pid) == "T" for pid in ranks), 5, "stopping the ranks")
        if not temporaries(job):
            return
        for pid in ranks:
            kill(pid, signal.SIGCONT)
        time.sleep(0.01)


KILLS = 20


@case("18", f"kill -9 of a job during a save, {KILLS} times one after the other: the last checkpoint loads each time, no "
      "temporary file is left, same weights", runs=10, deadline=lambda: 900)
def killed_again_and_again(job, run):
    hits, missed, step, left = 0, 0, 0, []
    while hits < KILLS:
        launcher = job.train(EPOCHS, ALWAYS, "--resume=auto", launcher=TWO)
        index = len(job.programs) - 1
        wait_until(lambda: "writes to run" in job.log(index), 60, "the start")
        if hits + missed > 0:
            step = check_resumes(job.log(index), step)
            check(not set(left) & set(temporaries(job)), f"temporary files are left: {left}")
        wait_for_checkpoint(job)
        pids = sorted(descendants(launcher.pid), key=lambda pid: not is_rank(pid, 0))
        hit = kill_in_save(job, pids)
        launcher.wait(5)
        wait_until(lambda: all(map(is_gone, pids)), 5, "the end of all processes")
        hits, missed, left = hits + hit, missed + (not hit), temporaries(job)
    resume_to_end(job)
    check_resumes(job.log(len(job.programs) - 1), step)
    check_no_temporaries(job)
    check_bits(job)
    return {"kills in a save": hits, "others": missed}


def check_resumes(log, step):
    """Checks that a run resumes from its last checkpoint, of this step or a later one. Returns the step."""
    resumed = re.search(r"resumes from run/last.pt at epoch \d+, step (\d+)", log)
    is_right = resumed and "damaged" not in log and int(resumed[1]) >= step
    check(is_right, f"it does not resume from step {step}: {log[-500:]}")
    return int(resumed[1])


CUTS, FLIPS = 100, 1000
RESUMED = 110  # for every 110th damage, a run resumes and trains to its end


@case("19", f"The last checkpoint is cut at each 1/{CUTS}, or one of {FLIPS} bits is changed: found, the one before it is taken",
      runs=1, deadline=lambda: 900)
def damaged_checkpoint(job, run):
    finder = os.path.join(ROOT, "build", "tests", "resume_finder")
    if not os.path.exists(finder):
        raise Unavailable(f"{finder} is not built", "libtorch")
    def train(run):
        job.train("--epochs=2", "--checkpoint.keep_last=2", "--resume=auto", launcher=("--nproc_per_node=1",), run=run)
        job.complete(len(job.programs) - 1)
        return job.log(len(job.programs) - 1)
    train("whole")
    last = job.path("whole", "last.pt")
    whole, expected = open(last, "rb").read(), tensors_of(last)
    [before] = [path for path in glob.glob(job.path("whole", "step-*.pt")) if not os.path.samefile(path, last)]
    before = os.path.basename(before)
    def damage(run, kind):
        """Writes the damaged checkpoint into a copy of the run, which has this checkpoint and the one before it."""
        if not os.path.exists(job.path(run)):
            newest = os.path.basename(last), *(os.path.basename(path) for path in glob.glob(job.path("whole", "step-*.pt"))
                                               if os.path.samefile(path, last))
            shutil.copytree(job.path("whole"), job.path(run), ignore=shutil.ignore_patterns(*newest))
        damaged = bytearray(whole[:len(whole) * kind // CUTS]) if kind < CUTS else bytearray(whole)
        bit = kind - CUTS
        if bit >= 0: damaged[bit // 8] ^= 1 << bit % 8
        open(job.path(run, "last.pt"), "wb").write(damaged)
    with subprocess.Popen([finder, "asked"], cwd=job.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True) as asked:
        for number, kind in enumerate([*range(CUTS), *random.sample(range(CUTS, CUTS + 8 * len(whole)), FLIPS)]):
            damage("asked", kind)
            asked.stdin.write("\n")
            asked.stdin.flush()
            warning, answer = asked.stdout.readline(), asked.stdout.readline().strip()
            check("is damaged: it is now" in warning, f"not found ({kind}): {warning}")
            check(answer == os.path.join("asked", before), f"damage {kind}: it resumes from {answer}")
            os.remove(job.path("asked", "last.pt.damaged"))
            if number % RESUMED: continue
            run = f"run{number}"
            damage(run, kind)
            log = train(run)
            check("is damaged: it is now" in log and "the run resumes from" in log, f"not found ({kind}): {log[-500:]}")
            check(tensors_of(job.path(run, "last.pt")) == expected, "another end")
    return {"damaged files": CUTS + FLIPS, "resumed and trained to the end": (CUTS + FLIPS) // RESUMED}


@case("22", "The loss of one rank is not finite: all ranks stop in that step, the rank is named", runs=3)
def not_a_number(job, run):
    # Rank 1 has the odd digits: in a batch with two 9s, the sum of weights overflows float32.
    job.train(EPOCHS, "--task.class_weights=[1, 1, 1, 1, 1, 1, 1, 1, 1, 3e38]", f"--seed={run}", launcher=TWO)
    job.end(75, 60)
    check(re.search(r"the loss of rank 1 is not finite in step \d+", job.log()), f"not named: {job.log()[-500:]}")
    names(job.log(), "[01]")
    return {}


@case("23", "SIGTERM or SIGUSR1 to the launcher, also during saves: saved, and no step is lost", runs=12)
def asked_to_stop(job, run):
    number, code = ((signal.SIGTERM, 143), (signal.SIGUSR1, 85))[run % 2]
    in_save = run % 4 > 1
    launcher = job.train(EPOCHS, ALWAYS if in_save else OFTEN, launcher=TWO)
    wait_for_checkpoint(job)
    time.sleep(wait_for_save(job) if in_save else random.uniform(0, 0.4))  # at any time of a save or of the run
    begin = time.monotonic()
    kill(launcher.pid, number)
    hit = bool(saves(job))
    job.end(code, 10)
    stopped = time.monotonic() - begin
    stop = re.search(r"stopped by \w+[^\n]*?step (\d+)", job.log())
    resume_to_end(job)
    resumed = re.search(r"step (\d+)", job.log(1))
    check(stop and resumed, f"the step is not named: {job.log()[-300:]} {job.log(1)[:300]}")
    check(stop[1] == resumed[1], f"stopped at step {stop[1]}, resumed at step {resumed[1]}")
    check_bits(job)
    return {"saved and ended": stopped, "of the signals in a save": int(hit)}


@case("25", "A control group of 12 processes for 40 workers: a clear error", runs=2)
def few_processes(job, run):
    needs_root("a control group")
    group = f"/sys/fs/cgroup/pids/syncbn-fault-{os.getpid()}"
    try:
        os.mkdir(group)
        job.undo.append(lambda: os.rmdir(group))
        open(f"{group}/pids.max", "w").write("12")
    except OSError as error:
        raise Unavailable(f"{group}: {error.strerror}", "cgroup") from None
    begin, before = time.monotonic(), children_seconds()
    job.start("--nproc_per_node=40", limits=lambda: open(f"{group}/cgroup.procs", "w").write(str(os.getpid())))
    job.end(75)
    check(re.search(r"cannot start rank \d+: Resource temporarily unavailable", job.log()), f"not named: {job.log()}")
    named = time.monotonic() - begin
    check_does_not_spin(before)
    return {"named": named}


@case("25", "64 MiB of /dev/shm for 4 ranks: they train", runs=1)
def small_shared_memory(job, run):
    needs_root("another /dev/shm")
    job.train("--epochs=1", launcher=options(4), before=(
        "unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"', "_"))
    job.complete()
    return {}


@case("28", "Nodes that differ in a key of the configuration, or in the network: refused, each difference named", runs=2)
def other_configuration(job, run):
    port = free_port()
    more = (("--optimizer.lr=0.2", "--seed=3"), ("--model.width=8",))[run % 2]
    for host in range(2):
        job.train(EPOCHS, *(more if host == 1 else ()), launcher=nodes(host, port))
    job.end_all(2, 60)
    wanted = (("optimizer.lr: 0.1 on rank 0", "0.2 on rank 1", "seed: 0 on rank 0"),
              ("model.width: 16 on rank 0", "8 on rank 1"))[run % 2]
    check("not started alike" in job.log() and all(one in job.log() for one in wanted), f"not named: {job.log()}")
    return {}


@case("28", "Nodes with another build of train, or another libtorch: refused, the difference named", runs=2)
def other_program(job, run):
    """Replaces the version's text in a copy of the program."""
    bin_folder, name = os.path.split(job.train_program)
    program = os.path.join(os.path.dirname(bin_folder), "libexec/syncbn", f"{name}_program")  # what bin/train executes
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    build, libtorch = re.search(r" ([\w-]+), libtorch ([\d.]+)", version).groups()
    text = (build, libtorch)[run % 2]
    other = text[:-1] + ("1" if text[-1] == "0" else "0")
    content = open(program, "rb").read()
    check(content.count(text.encode() + b"\0") == 1, f"{text} is not in the program once")
    open(job.path("train"), "wb").write(content.replace(text.encode() + b"\0", other.encode() + b"\0"))
    os.chmod(job.path("train"), 0o755)
    port = free_port()
    for host in range(2):
        job.train_program = job.path("train") if host == 1 else program
        job.train(EPOCHS, launcher=nodes(host, port), env={"SYNCBN_DATA_DIR": os.path.join(ROOT, "data")})
    job.end_all(2, 60)
    key, before = (("build of train", version.split()[1] + " "), ("version of libtorch", ""))[run % 2]
    check(re.search(rf'{key}: "{before}{text}" on rank 0 .*, "{before}{other}" on rank 1', job.log()), f"not named: {job.log()}")
    return {}
