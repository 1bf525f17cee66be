// Our implementation of TCPStore's protocol against torch's: our client and our server.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <syncbn/base/env.h>

#include <deque>

#include "store_serving.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"

namespace syncbn::launch::test {
namespace {

using ::syncbn::test::Program;
using ::syncbn::test::ProgramResult;
using ::syncbn::test::python;
using ::syncbn::test::python_has_torch;
using ::syncbn::test::run_program;
using ::syncbn::test::RunProgramOptions;
using ::testing::HasSubstr;

RunProgramOptions options(const ServingStore& store) {
  return {.env = {{"MASTER_ADDR", "127.0.0.1"},
                  {"MASTER_PORT", std::to_string(store.port())},
                  {"OMP_NUM_THREADS", "1"}}};
}

constexpr const char* kConnect = R"(
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                      timeout=timedelta(seconds=100))
)";

constexpr const char* kAllQueries = R"(
store.set("key", "value")
assert store.get("key") == b"value"
assert store.add("n", 3) == 3 and store.add("n", -1) == 2
assert store.check(["key", "n"]) and not store.check(["key", "none"])
store.wait(["key", "n"])
try:
    store.wait(["none"], timedelta(milliseconds=10))
    assert False
except RuntimeError as error:
    assert "timeout" in str(error).lower(), error
assert store.get("key") == b"value"
assert store.compare_set("c", "", "1") == b"1"
assert store.compare_set("c", "x", "2") == b"1"
assert store.compare_set("c", "1", "2") == b"2"
assert store.delete_key("c") and not store.delete_key("c")
assert store.num_keys() == 2
store.append("a", "x")
store.append("a", "yz")
assert store.get("a") == b"xyz"
store.multi_set(["m1", "m2"], ["one", "two"])
assert store.multi_get(["m2", "m1"]) == [b"two", b"one"]
store.set("large", "x" * 5_000_000)
assert len(store.get("large")) == 5_000_000
said = ["queries"]
if hasattr(store, "queue_push"):
    store.queue_push("q", "1")
    store.queue_push("q", "2")
    assert store.queue_len("q") == 2
    assert store.queue_pop("q") == b"1" and store.queue_pop("q") == b"2"
    try:
        store.queue_pop("q", block=False)
        assert False
    except dist.QueueEmptyError:
        said.append("queues")
if hasattr(store, "list_keys"):
    assert sorted(store.list_keys()) == ["a", "key", "large", "m1", "m2", "n"], store.list_keys()
    said.append("list_keys")
if hasattr(store, "barrier"):
    store.barrier("alone", 1)
    said.append("barrier")
copy = store.clone() if hasattr(store, "clone") else store
assert copy.get("n") == b"2"
print(*said)
)";

TEST(StorePythonTest, TorchsClientAsksOurServerAllThereIs) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  ServingStore store;
  const ProgramResult result =
      run_program({python(), "-c", fmt::format("{}{}", kConnect, kAllQueries)}, options(store));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("queries"));
  store.run([](StoreServer& server) { EXPECT_EQ(server.get("a"), "xyz"); });
}

constexpr const char* kBarriers = R"(
from torch.distributed.elastic.utils import store as store_util
rank = int(sys.argv[1])
for i in range(20):
    store_util.barrier(store, world_size=2, key_prefix=f"barrier{i}", barrier_timeout=100)
    if hasattr(store, "barrier"):
        store.barrier(f"short{i}", 2)
print(store_util.synchronize(store, bytes([65 + rank]), rank, 2, "all", timeout=100))
)";

TEST(StorePythonTest, TwoProcessesMeetAtBarriers) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  const ServingStore store;
  std::deque<Program> ranks;
  for (const char* rank : {"0", "1"}) {
    ranks.emplace_back(
        std::vector<std::string>{python(), "-c", fmt::format("{}{}", kConnect, kBarriers), rank},
        options(store));
  }
  for (Program& rank : ranks) {
    const ProgramResult result = rank.wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.out, "[b'A', b'B']\n");
  }
}

constexpr const char* kAllReduce = R"(
import torch, torch.distributed as dist
dist.init_process_group("gloo")
sum = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(sum)
objects = [None] * dist.get_world_size()
dist.all_gather_object(objects, dist.get_rank())
dist.barrier()
print(sum.item(), objects)
dist.destroy_process_group()
)";

TEST(StorePythonTest, AProcessGroupFormsWithUsAsTheAgentsStore) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  const ServingStore store;
  std::deque<Program> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    RunProgramOptions with = options(store);
    with.env.insert({{"RANK", std::to_string(rank)},
                     {"WORLD_SIZE", "3"},
                     {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
    ranks.emplace_back(std::vector<std::string>{python(), "-c", kAllReduce}, with);
  }
  for (Program& rank : ranks) {
    const ProgramResult result = rank.wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.out, "6.0 [0, 1, 2]\n");
  }
}

TEST(StorePythonTest, TorchrunsAgentsMeetInOurStore) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  const ServingStore store;
  std::deque<Program> agents;
  for (int node = 0; node < 2; ++node) {
    agents.emplace_back(std::vector<std::string>{
        python(), "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
        "--rdzv-backend=c10d", fmt::format("--rdzv-endpoint=127.0.0.1:{}", store.port()),
        "--rdzv-conf=is_host=0", "--rdzv-id=ours", "--local-addr=127.0.0.1", "--no-python", "sh",
        "-c", "echo rank=$RANK of $WORLD_SIZE"});
  }
  std::string all;
  for (Program& agent : agents) {
    const ProgramResult result = agent.wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    all += result.out;
  }
  EXPECT_THAT(all, HasSubstr("rank=0 of 2"));
  EXPECT_THAT(all, HasSubstr("rank=1 of 2"));
}

constexpr const char* kServer = R"(
import sys
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                      timeout=timedelta(seconds=100), use_libuv=sys.argv[1] == "libuv")
print(store.port, flush=True)
print(store.get("greeting").decode(), flush=True)
store.set("answer", "from torch")
store.wait(["done"])
)";

class StorePythonServerTest : public ::testing::TestWithParam<const char*> {};

TEST_P(StorePythonServerTest, AnswersOurClient) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  Program server({python(), "-c", kServer, GetParam()});
  ASSERT_TRUE(server.wait_until([&] { return server.out().ends_with('\n'); }));
  StoreClient client = StoreClient::connect("localhost", std::stoi(server.out()), soon());
  expect_answers(greeted(std::stoi(server.out())), exchanges_of_all_versions());
  const std::string large(store::kMaxValueSize, 'x');
  client.set("large", large, soon());
  EXPECT_EQ(client.get("large", soon()), large);
  client.start_wait("answer", soon());
  EXPECT_FALSE(client.wait_done());
  StoreClient other = StoreClient::connect("127.0.0.1", std::stoi(server.out()), soon());
  other.set("greeting", "hello", soon());
  pollfd ready{client.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&ready, 1, -1), 1);
  EXPECT_TRUE(client.wait_done());
  EXPECT_EQ(client.get("answer", soon()), "from torch");
  client.set("done", "", soon());
  const ProgramResult result = server.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("\nhello\n"));
}

INSTANTIATE_TEST_SUITE_P(Backends, StorePythonServerTest, ::testing::Values("libuv", "legacy"),
                         [](const auto& backend) { return backend.param; });

}  // namespace
}  // namespace syncbn::launch::test
