"""Each collective that torch.distributed has for CPUs, compared with Gloo's results."""

import ranks  # first: it skips the tests where there is no torch

import datetime
import itertools
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
          torch.uint8, torch.int8]
OPS = ["SUM", "PRODUCT", "MIN", "MAX"]
BIT_OPS = ["BAND", "BOR", "BXOR"]


def values(rank, dtype, *sizes, seed=0):
    """Small integers, so that sums are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(1, 4, sizes, generator=generator).to(dtype)


def cases(rank, size):
    """Pairs of a name and a function that takes the group and returns tensors to compare."""
    for dtype, op in itertools.product(DTYPES, OPS):
        def all_reduce(group, dtype=dtype, op=op):
            tensor = values(rank, dtype, 5, 3)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group)
            return [tensor]
        yield f"all_reduce {op} {dtype}", all_reduce
    for op in BIT_OPS:
        def bits(group, op=op):
            tensor = values(rank, torch.int32, 7)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group)
            return [tensor]
        yield f"all_reduce {op}", bits

    def average(group):
        tensor = values(rank, torch.float32, 100_003)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        return [tensor / size]
    yield "all_reduce async, longer than a segment's slot", average

    def strided(group):
        tensor = values(rank, torch.float32, 4, 6).t()
        rows = [torch.empty(4, 6).t() for _ in range(size)]
        dist.all_gather(rows, tensor, group=group)
        return rows
    yield "all_gather of transposed tensors", strided

    for dtype in DTYPES:
        def broadcast(group, dtype=dtype):
            tensor = values(rank, dtype, 9)
            dist.broadcast(tensor, size - 1, group=group)
            return [tensor]
        yield f"broadcast {dtype}", broadcast

        def all_gather(group, dtype=dtype):
            rows = [torch.empty(2, 3, dtype=dtype) for _ in range(size)]
            dist.all_gather(rows, values(rank, dtype, 2, 3), group=group)
            return rows
        yield f"all_gather {dtype}", all_gather

        def all_gather_into_tensor(group, dtype=dtype):
            rows = torch.empty(2 * size, 3, dtype=dtype)
            dist.all_gather_into_tensor(rows, values(rank, dtype, 2, 3), group=group)
            return [rows]
        yield f"all_gather_into_tensor {dtype}", all_gather_into_tensor

        def reduce(group, dtype=dtype):
            tensor = values(rank, dtype, 6)
            dist.reduce(tensor, 1, group=group)
            return [tensor] if rank == 1 else []
        yield f"reduce {dtype}", reduce

        def gather(group, dtype=dtype):
            rows = [torch.empty(4, dtype=dtype) for _ in range(size)] if rank == 0 else None
            dist.gather(values(rank, dtype, 4), rows, dst=0, group=group)
            return rows or []
        yield f"gather {dtype}", gather

        def scatter(group, dtype=dtype):
            rows = [values(other, dtype, 4, seed=7) for other in range(size)]
            out = torch.empty(4, dtype=dtype)
            dist.scatter(out, rows if rank == 1 else None, src=1, group=group)
            return [out]
        yield f"scatter {dtype}", scatter

        def all_to_all_single(group, dtype=dtype):
            out = torch.empty(2 * size, dtype=dtype)
            dist.all_to_all_single(out, values(rank, dtype, 2 * size), group=group)
            return [out]
        yield f"all_to_all_single {dtype}", all_to_all_single

        def reduce_scatter_tensor(group, dtype=dtype):
            out = torch.empty(3, dtype=dtype)
            dist.reduce_scatter_tensor(out, values(rank, dtype, 3 * size), group=group)
            return [out]
        yield f"reduce_scatter_tensor {dtype}", reduce_scatter_tensor

        def send_recv(group, dtype=dtype):
            received = torch.empty(5, dtype=dtype)
            sent = dist.isend(values(rank, dtype, 5), (rank + 1) % size, group=group, tag=3)
            dist.recv(received, (rank - 1) % size, group=group, tag=3)
            sent.wait()
            return [received]
        yield f"isend and recv {dtype}", send_recv

    def reduce_scatter(group):
        out = torch.empty(3)
        dist.reduce_scatter(out, [values(rank, torch.float32, 3, seed=s) for s in range(size)],
                            group=group)
        return [out]
    yield "reduce_scatter", reduce_scatter

    def reduce_scatter_uneven(group):
        out = torch.empty(rank + 1)
        dist.reduce_scatter(out, [values(rank, torch.float32, s + 1, seed=s) for s in range(size)],
                            group=group)
        return [out]
    yield "reduce_scatter of parts of different sizes", reduce_scatter_uneven

    def uneven(group):
        own = [rank + other + 1 for other in range(size)]
        out = torch.empty(sum(own))
        dist.all_to_all_single(out, values(rank, torch.float32, sum(own)), own, own, group=group)
        return [out]
    yield "all_to_all_single with splits", uneven

    def batch(group):
        received = torch.empty(4)
        for work in dist.batch_isend_irecv([
                dist.P2POp(dist.isend, values(rank, torch.float32, 4), (rank + 1) % size, group),
                dist.P2POp(dist.irecv, received, (rank - 1) % size, group)]):
            work.wait()
        return [received]
    yield "batch_isend_irecv", batch

    def objects(group):
        gathered = [None] * size
        dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank}, group=group)
        one = ["from rank 1" if rank == 1 else None]
        dist.broadcast_object_list(one, 1, group=group)
        assert one == ["from rank 1"]
        return [torch.tensor([item["rank"], len(item["text"])]) for item in gathered]
    yield "objects", objects

    def coalesced(group):
        tensors = [values(rank, torch.float32, n) for n in (3, 8)]
        with dist._coalescing_manager(group):
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        return tensors
    yield "coalesced all_reduce", coalesced

    def functional_coalesced(group):
        rows = functional.reduce_scatter_tensor_coalesced(
            [values(rank, torch.float32, n * size) for n in (1, 4)], "sum", [0, 0], group)
        rows = [functional.wait_tensor(row) for row in rows]
        return [functional.wait_tensor(all_rows)
                for all_rows in functional.all_gather_into_tensor_coalesced(rows, group)]
    yield "coalesced reduce_scatter and all_gather", functional_coalesced

    def gradient(group):
        tensor = values(rank, torch.float32, 4).requires_grad_()
        rows = differentiable.all_gather(tensor, group=group)
        sum((rank + other + 1) * row.sum() for other, row in enumerate(rows)).backward()
        return [tensor.grad]
    yield "gradient of torch.distributed.nn.functional.all_gather", gradient

    def empty(group):
        tensor = torch.empty(0)
        dist.all_reduce(tensor, group=group)
        dist.broadcast(tensor, 0, group=group)
        dist.barrier(group=group)
        return [tensor]
    yield "empty tensors", empty


@ranks.in_group
def equal_gloos(rank):
    size = dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    again = dist.new_group()  # with the default group's backend
    count = 0
    for name, run in cases(rank, size):
        expected = attempt(run, gloo)
        for group in (dist.group.WORLD, again):
            got = attempt(run, group)
            if isinstance(expected, str):
                assert isinstance(got, str), f"{name}: gloo refuses ({expected}), syncbn does not"
            else:
                assert not isinstance(got, str), f"{name}: {got}"
                for one, other in zip(got, expected, strict=True):
                    assert one.dtype == other.dtype and torch.equal(one, other), f"{name}: {one} {other}"
        count += not isinstance(expected, str)
    if rank == 0:
        print("equal", count, flush=True)


def attempt(run, group):
    """The tensors, or the message of the refusal."""
    try:
        return run(group)
    except (RuntimeError, ValueError) as error:
        return str(error)


@ranks.in_group
def groups(rank):
    outer = dist.new_group([0, 2])
    inner = dist.new_group([1, 2])
    for members, group in (([0, 2], outer), ([1, 2], inner)):
        if rank in members:
            total = torch.tensor([10.0**rank])
            dist.all_reduce(total, group=group)
            assert total.item() == sum(10.0**one for one in members), total
    if rank in (1, 2):
        dist.destroy_process_group(inner)
    third = dist.new_group([0, 1, 2])
    total = torch.ones(1)
    dist.all_reduce(total, group=third)
    if rank == 0:
        print("groups", total.item(), flush=True)


@ranks.in_group
def group_timeouts(rank):
    ranks.tell_refusal(lambda: dist.new_group(timeout=datetime.timedelta(0)))
    group = dist.new_group(timeout=datetime.timedelta(days=1000 * 365))
    if rank == 1:
        time.sleep(1)  # so that rank 0 waits
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    print(f"rank {rank}: total {total.item():.0f}", flush=True)


@ranks.in_group
def different_sizes(rank):
    ranks.tell_refusal(lambda: dist.all_reduce(torch.zeros(3 + rank)))


@ranks.in_group
def refused(rank):
    # Rank 0 sends two rows of two to rank 1, which expects three.
    sent, expected = [([1, 2], [1, 1]), ([1, 1], [3, 1])][rank]
    for call in (lambda: dist.all_to_all_single(torch.empty(sum(expected), 2), torch.ones(sum(sent), 2), expected, sent),
                 lambda: dist.all_reduce(torch.ones(3, dtype=torch.int16))):
        ranks.tell_refusal(call)
    total = torch.ones(3)
    dist.all_reduce(total)
    print(f"rank {rank}: total {total[0]:.0f}", flush=True)


@ranks.in_group
def expanded(rank):
    one_element = torch.zeros(1).expand(4)
    calls = {
        "all_reduce": lambda: dist.all_reduce(one_element),
        "all_gather": lambda: dist.all_gather([one_element, torch.zeros(4)], torch.ones(4)),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.zeros(1).expand(8), torch.ones(4)),
        "broadcast": lambda: dist.broadcast(one_element, 0),  # on rank 1 alone, which receives
        "reduce_scatter": lambda: dist.reduce_scatter(one_element, [torch.ones(4), torch.ones(4)]),
    }
    for name, call in calls.items():
        ranks.tell_refusal(call, (RuntimeError, ValueError))
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [2.0] * 3, name
    print(f"rank {rank}: went on", flush=True)


# As PyTorch's ProcessGroupGlooTest.test_allgather_stress: the futures are requested while the calls run.
@ranks.in_group
def many_futures(rank):
    size = dist.get_world_size()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for _ in range(3):
        rows = [[[torch.tensor([-1]) for _ in range(size)]] for _ in range(1000)]
        own = [[torch.tensor([i + rank])] for i in range(1000)]
        futures = [backend.allgather(rows[i], own[i]).get_future() for i in range(1000)]
        del own
        for i, future in enumerate(futures):
            future.wait()
            assert [row.item() for row in rows[i][0]] == [i + other for other in range(size)], i
    print(f"rank {rank}: got all", flush=True)


@ranks.in_group
def many_polls(rank):
    for _ in range(100):
        works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(10)]
        while not all(work.is_completed() for work in works):
            pass
    print(f"rank {rank}: got all", flush=True)


@ranks.in_group
def refused_peers(rank):
    for call in (lambda: dist.send(torch.ones(1), 2), lambda: dist.recv(torch.ones(1), -1)):
        ranks.tell_refusal(call)
    total = torch.ones(3)
    dist.all_reduce(total)
    print(f"rank {rank}: total {total[0]:.0f}", flush=True)


@ranks.in_group
def refused_lists(rank):
    of_each = [torch.ones(2), torch.ones(2)]
    mixed = [torch.ones(2), torch.ones(2, dtype=torch.float64)]
    # dist.all_to_all() itself refuses different dtypes.
    for outputs, inputs in (of_each, []), ([], of_each), (of_each[:1], of_each), (of_each, mixed), (mixed, of_each):
        ranks.tell_refusal(lambda: dist.group.WORLD.alltoall(outputs, inputs))
    dist.all_to_all(of_each, [torch.full((2,), 10.0 * rank + other) for other in range(2)])
    print(f"rank {rank}: got {[one[0].item() for one in of_each]}", flush=True)


def killed_rank():
    import syncbn  # noqa: F401
    dist.init_process_group("syncbn")
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.tell_refusal(lambda: dist.all_reduce(torch.zeros(1000)), dist.DistBackendError)
    os._exit(0)


def outputs(function, count):
    return [output for _, output in ranks.run_each(function, count)]


class CollectivesTest(ranks.RanksTest):
    def test_results_equal_gloos(self):
        self.expect_success(ranks.run(equal_gloos, 3, SYNCBN_SHARED_MEMORY="1"), "equal ")

    def test_results_equal_gloos_without_shared_memory(self):
        self.expect_success(ranks.run(equal_gloos, 3, SYNCBN_SHARED_MEMORY="0"), "equal ")

    def test_results_equal_gloos_on_two_hosts(self):
        self.need_namespaces()
        first, second = ranks.run_on_two_hosts(equal_gloos, 2)
        self.expect_success(first, "equal ")
        self.expect_success(second, "")

    def test_groups_of_some_ranks(self):
        self.expect_success(ranks.run(groups, 3), "groups 3.0")

    def test_a_groups_timeout_is_above_zero_and_may_be_a_thousand_years(self):
        done = outputs(group_timeouts, 2)
        for rank in range(2):
            self.assertIn(f"rank {rank}: new_group: the timeout must be above zero, got 0 ms", done[rank])
            self.assertIn(f"rank {rank}: total 2", done[rank])

    # The message first names the rank that waited first.
    def test_different_sizes_are_named_on_each_rank(self):
        done = outputs(different_sizes, 2)
        for rank in range(2):
            self.assertRegex(done[rank], rf"rank {rank}: rank {rank} of 2 on .*: all_reduce #1 of group '0' "
                             r"failed: the ranks made different calls: (?=.*\[3\])(?=.*\[4\])")

    def test_refusals_are_the_same_on_each_rank_and_the_group_goes_on(self):
        done = outputs(refused, 2)
        for rank in range(2):
            self.assertIn(f"rank {rank}: rank {rank} of 2: all_to_all #2 of group '0' was refused: rank 0 sends 4 elements "
                          "to rank 1, which expects 6 (all_to_all of Float)", done[rank])
            self.assertIn(f"rank {rank}: rank {rank} of 2: all_reduce #2 of group '0' was refused: ", done[rank])
            self.assertIn(f"rank {rank}: total 2", done[rank])

    def test_an_output_whose_elements_share_memory_is_refused_and_the_group_goes_on(self):
        done = outputs(expanded, 2)
        for rank in range(2):
            self.assertRegex(done[rank], rf"rank {rank}: rank {rank} of 2: all_reduce #1 of group '0' was "
                             "refused: .*single memory location")
            self.assertNotIn("not refused", done[rank])
            self.assertIn(f"rank {rank}: went on", done[rank])

    def test_futures_are_requested_while_calls_end(self):
        for count in (2, 3):
            self.expect_success(ranks.run(many_futures, count), "got all")

    def test_works_are_polled_while_calls_end(self):
        self.expect_success(ranks.run(many_polls, 2), "got all")

    def test_a_peer_outside_the_group_is_named_and_the_group_goes_on(self):
        done = outputs(refused_peers, 2)
        for rank in range(2):
            of_group = f"on rank {rank} of 2 of group '0' was refused"
            self.assertIn(f"rank {rank}: send {of_group}: destination 2 is outside the group of 2 ranks", done[rank])
            self.assertIn(f"rank {rank}: recv {of_group}: source -1 is outside the group of 2 ranks", done[rank])
            self.assertIn(f"rank {rank}: total 2", done[rank])

    def test_lists_that_do_not_fit_are_refused_on_each_rank_and_the_group_goes_on(self):
        done = outputs(refused_lists, 2)
        for rank in range(2):
            self.assertNotIn("not refused", done[rank])
            for why in ("inputs has length 0, and the group has 2 ranks", "outputs has length 0, and",
                        "outputs has length 1, and", "inputs has a tensor of Double, and inputs[0] is of Float",
                        "outputs has a tensor of Double, and inputs[0] is of Float"):
                self.assertIn(f"rank {rank}: rank {rank} of 2: all_to_all #1 of group '0' was refused: {why}", done[rank])
            self.assertIn(f"rank {rank}: got [{rank}.0, {10 + rank}.0]", done[rank])

    def test_the_others_learn_which_rank_was_killed(self):
        done = outputs(killed_rank, 3)
        for rank in (0, 2):
            self.assertRegex(done[rank], rf"rank {rank}: .*all_reduce #2 of group '0' failed: "
                             rf"rank 1 \(\S+, process \d+\) died")


if __name__ == "__main__":
    ranks.main(globals())
