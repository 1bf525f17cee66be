// What strangers that reach the port of node 0 can do, and what launchers without the job's token
// cannot do.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/message_seal.h>
#include <syncbn/base/store_greeting.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/descriptors.h"
#include "common/handshake.h"
#include "common/json_messages.h"
#include "launch/launcher.h"
#include "launch/nodes.h"
#include "launch/stranger.h"
#include "nodes/master_port.h"
#include "store/store_client.h"
#include "support/connection.h"
#include "support/environment_guard.h"
#include "support/eventually.h"
#include "support/listener.h"
#include "support/text.h"

namespace syncbn::test {
namespace {

using base::MessageSeal;
using launch::Handshake;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Clock = std::chrono::steady_clock;

constexpr const char* kToken = "0123456789abcdef-the-token-of-this-test";

/// Writes a token file into the folder of `nodes` and returns the option for it.
std::string token_option(const Nodes& nodes, const std::string& token, unsigned mode = 0600) {
  const std::string name = "token-" + std::to_string(token.size()) + "-" + std::to_string(mode);
  const std::string path = nodes.folder().write(name, token + "\n");
  std::filesystem::permissions(path, std::filesystem::perms(mode));
  return "--token_file=" + path;
}

/// Whether the other side has closed the connection.
bool is_closed(const base::UniqueFd& fd) {
  char bytes[1024];
  ssize_t count = 0;
  do {
    count = ::recv(fd.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
  } while (count > 0);
  return count == 0 || errno != EAGAIN;
}

/// Whether a process listens on this address and port.
bool accepts(const char* address, int port) {
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  ::inet_pton(AF_INET, address, &to.sin_addr);
  const base::UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return ::connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0;
}

/// Connects to the store from an address of this machine and sends its greeting.
base::UniqueFd ask_store(int port, const char* from) {
  sockaddr_in own{};
  own.sin_family = AF_INET;
  ::inet_pton(AF_INET, from, &own.sin_addr);
  sockaddr_in store{};
  store.sin_family = AF_INET;
  store.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  store.sin_port = htons(static_cast<uint16_t>(port));
  base::UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&own), sizeof(own)), 0);
  EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&store), sizeof(store)), 0);
  EXPECT_TRUE(send_to(fd, base::store_greeting(1)));
  return fd;
}

TEST(LaunchSecurityTest, NoStrangerForgesLinesOfTheLauncher) {
  JobWithStranger job(R"(a\nsyncbn-launch: forged host\u001b[2J)");
  send_to(job.stranger,
          R"({"type":"failed","attempt":0,"exit_code":5,"may_restart":false,)"
          R"("rank":1,"status":1280,"step":-1,"what":"b\r\nsyncbn-launch: forged cause\u001b[2Jc"})"
          "\n"
          R"({"type":"ended","attempt":0})"
          "\n");
  const auto result = job.lead.wait();
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("forged host"), HasSubstr("forged cause"), HasSubstr("[2Jc"),
                    Not(HasSubstr("\nsyncbn-launch: forged")), Not(HasSubstr("\x1b"))));
}

// nlohmann's functions that copy or print it would recurse until the stack overflows.
TEST(LaunchSecurityTest, ADeepMessageEndsNoLauncher) {
  JobWithStranger job("deep");
  const size_t depth = 500'000;
  send_to(job.stranger,
          R"({"type":"failed","attempt":0,"exit_code":5,"may_restart":true,"what":"",)"
          R"("step":)" +
              std::string(depth, '[') + std::string(depth, ']') + "}\n");
  const auto result = job.lead.wait();
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.err, HasSubstr(std::string("node 1 (deep) sent ") + launch::kBadMessage));
}

TEST(LaunchSecurityTest, IdleConnectionsAreDroppedAtTheirDeadlineAndKeepNobodyOut) {
  Nodes nodes(2);
  Program& lead = nodes.start(0, 1, {}, until_go());
  std::vector<base::UniqueFd> idle;
  for (int i = 0; i < 1000; ++i) {
    idle.push_back(connect_to(nodes.port()));
    ASSERT_TRUE(idle.back());
  }
  nodes.start(1, 1, {}, until_go());
  ASSERT_TRUE(lead.wait_until([&] { return nodes.both_are_up(); }));
  for (const auto& fd : idle) EXPECT_TRUE(eventually([&] { return is_closed(fd); }));
  nodes.folder().write("go", "");
  for (const auto& result : nodes.wait()) EXPECT_EQ(result.exit_code, 0) << result.err;
}

TEST(LaunchSecurityTest, ManyStrangersDoNotSilenceWhatConcernsTheJob) {
  Nodes nodes(2);
  Program& lead = nodes.start(0, 1, {"--rdzv_conf=store_mib=1"}, until_go());
  for (int i = 0; i < 25; ++i) {
    const base::UniqueFd stranger = connect_to(nodes.port());
    ASSERT_TRUE(send_to(stranger, "syncbn-agent 1\n"));
    receive_line(stranger);
  }
  const auto soon = Clock::now() + std::chrono::seconds(30);
  auto client = launch::StoreClient::connect("127.0.0.1", nodes.port(), soon);
  EXPECT_THROW(
      {
        client.set("key", std::string(2 << 20, 'x'), soon);
        client.get("key", soon);
      },
      base::UnavailableError);
  ASSERT_TRUE(lead.wait_for_err("the workers' store is full"));
  EXPECT_THAT(lead.err(),
              AllOf(HasSubstr("(further ones are not shown)"), HasSubstr("a client at 127.0.0.1"),
                    HasSubstr("--rdzv_conf=store_mib=N raises the limit")));
  nodes.start(1, 1, {}, {"true"});
  nodes.folder().write("go", "");
  EXPECT_EQ(lead.wait().exit_code, 0);
}

TEST(LaunchSecurityTest, ADamagedFirstMessageIsNamed) {
  Nodes nodes(2);
  Program& lead = nodes.start(0, 1, {}, {"true"});
  const std::string damaged = std::string("it sent ") + launch::kBadMessage;
  int lines = 0;
  for (const auto& [message, what] : std::vector<std::pair<std::string, std::string>>{
           {kAgentGreeting + std::string(R"({"type":"hel)"), ""},  // the rest may still arrive
           {"syncbn-age", ""},
           {"syncbn-agent " + std::string(2000, 'x'), damaged},
           {kAgentGreeting + std::string("{\"type\":\"hel\x01\n"), damaged},
           {kAgentGreeting + std::string("{\"type\":\"hello\"}\n"),
            "node 0 does not understand a message of this launcher"},
           {kAgentGreeting + std::string(100 << 10, 'x'), damaged},
           {"syncbn-agent 2\n", "the launchers of this job are of different versions"},
           {"GET /metrics HTTP/1.1\r\nHost: x\r\n",
            "it is no launcher, but sends 'GET /metrics HTTP/1.1'"},
           // Neither of these ever ends a line.
           {"*1 PING", "it is no launcher, but sends '*1 PING'"},
           {"\x16\x03\x01" + std::string(500, 'x'),
            "it is no launcher, but sends '\\x16\\x03\\x01" + std::string(197, 'x') + "'"}}) {
    const base::UniqueFd stranger = connect_to(nodes.port());
    send_to(stranger, message);
    if (what.empty()) continue;
    ++lines;
    const std::string line = "refused a launcher at 127.0.0.1: ";
    ASSERT_TRUE(lead.wait_until([&] { return count(lead.err(), line) == lines; })) << lead.err();
    EXPECT_THAT(lead.err(), HasSubstr(line + what + "\n"));
  }
  EXPECT_EQ(nodes.start(1, 1, {}, {"true"}).wait().exit_code, 0);
  EXPECT_EQ(lead.wait().exit_code, 0);
}

TEST(LaunchSecurityTest, AGreetingMayComeInPieces) {
  Nodes nodes(2);
  Program& lead = nodes.start(0, 1, {}, until_go());
  base::UniqueFd launcher = connect_to(nodes.port());
  const std::string greeting = kAgentGreeting;
  for (const std::string& piece :
       {greeting.substr(0, 1), greeting.substr(1, 11), greeting.substr(12) + hello("in-pieces")}) {
    ASSERT_TRUE(send_to(launcher, piece));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // so that it arrives alone
  }
  EXPECT_TRUE(lead.wait_until([&] { return nodes.has("up0"); })) << lead.err();
  launcher.reset();
  EXPECT_EQ(lead.wait().exit_code, 75);
}

TEST(LaunchSecurityTest, NodeZeroListensOnlyWhereItIsTold) {
  for (const bool is_loopback : {true, false}) {
    Nodes nodes(2);
    // TEST-NET-1: an address that no host has.
    const char* const master = is_loopback ? "--master_addr=localhost" : "--master_addr=192.0.2.1";
    Program& lead = nodes.start(0, 1, {master}, {"true"});
    connect_to(nodes.port());
    EXPECT_EQ(accepts("127.0.0.2", nodes.port()), !is_loopback);
    lead.end_by(SIGTERM);
  }
}

TEST(LaunchTokenTest, LaunchersWithTheTokenFormAJobAndNoLogHasIt) {
  Nodes nodes(2);
  const std::string option = token_option(nodes, kToken);
  const std::string events = (nodes.folder() / "events.jsonl").string();
  nodes.start_all(1, {option, "--event_log_handler=json:" + events},
                  shell("env > env$RANK; touch up$RANK; while [ ! -e go ]; do sleep 0.01; done"));
  ASSERT_TRUE(nodes[0].wait_until([&] { return nodes.both_are_up(); }));
  for (const size_t node : {0U, 1U}) {
    EXPECT_THAT(base::read_file(fmt::format("/proc/{}/cmdline", nodes[node].pid())),
                Not(HasSubstr(kToken)));
  }
  nodes.folder().write("go", "");
  for (const auto& result : nodes.wait()) {
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.err, Not(HasSubstr(kToken)));
  }
  for (const std::string name : {"env0", "env1", "events.jsonl"}) {
    EXPECT_THAT(base::read_file(nodes.folder() / name),
                AllOf(Not(HasSubstr(kToken)), Not(::testing::IsEmpty())))
        << name;
  }
}

// The secret by which their peer monitors recognise each other.
TEST(LaunchTokenTest, AllWorkersOfAnAttemptInheritASecret) {
  Nodes nodes(2);
  const std::vector<std::string> options{token_option(nodes, kToken), "--max_restarts=1"};
  const auto script = shell(
      "cat /dev/fd/$SYNCBN_SECRET_FD > $RANK.$TORCHELASTIC_RESTART_COUNT; "
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; "
      "while [ ! -s 0.0 ] || [ ! -s 1.0 ]; do sleep 0.01; done; exit $RANK");
  nodes.start_all(1, options, script);
  for (const auto& result : nodes.wait()) EXPECT_EQ(result.exit_code, 0) << result.err;
  const auto secret = [&nodes](const char* name) { return base::read_file(nodes.folder() / name); };
  EXPECT_THAT(secret("0.0"), ::testing::MatchesRegex("syncbn-secret [0-9a-f]{64}"));
  EXPECT_EQ(secret("0.0"), secret("1.0"));
  EXPECT_EQ(secret("0.1"), secret("1.1"));
  EXPECT_NE(secret("0.0"), secret("0.1"));
  const auto alone =
      launch({"--nproc_per_node=2", "sh", "-c", "cat /dev/fd/$SYNCBN_SECRET_FD; echo"});
  EXPECT_THAT(alone.out, ::testing::ContainsRegex("syncbn-secret [0-9a-f]{64}"));
  Nodes without_token(2);
  without_token.start_all(1, {}, shell("echo fd=${SYNCBN_SECRET_FD:-none}"));
  for (const auto& result : without_token.wait()) EXPECT_THAT(result.out, HasSubstr("fd=none"));
}

TEST(LaunchTokenTest, OnlyAddressesOfLaunchersWithTheTokenAreServedByTheStore) {
  Nodes nodes(2);
  const std::string option = token_option(nodes, kToken);
  nodes.start_all(1, {option}, until_go());
  ASSERT_TRUE(nodes[0].wait_until([&] { return nodes.both_are_up(); }));
  EXPECT_NE(receive(ask_store(nodes.port(), "127.0.0.1"), 1), "");
  EXPECT_EQ(receive(ask_store(nodes.port(), "127.0.0.2")), "");
  EXPECT_TRUE(nodes[0].wait_for_err(
      "refused a client of the workers' store at 127.0.0.2: no launcher with the "
      "job's token has joined from there"));
  nodes.folder().write("go", "");
  for (const auto& result : nodes.wait()) EXPECT_EQ(result.exit_code, 0) << result.err;
}

TEST(LaunchTokenTest, TheVariableIsATokenAndWorkersDoNotGetIt) {
  const auto result =
      launch({"sh", "-c", "echo token=$SYNCBN_TOKEN"}, {.env = {{"SYNCBN_TOKEN", kToken}}});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "token=\n");
}

TEST(LaunchTokenTest, AnotherOrNoTokenIsRefusedOnEitherSide) {
  struct Case {
    std::string leads;
    std::string joins;
    const char* what;
  };
  const std::string other = std::string(kToken) + "x";
  for (const Case& one :
       {Case{kToken, other, "its token (--token_file, SYNCBN_TOKEN) is another"},
        Case{kToken, "", "it has no token, and this job needs one"},
        Case{"", kToken, "it has a token (--token_file, SYNCBN_TOKEN), and node"}}) {
    Nodes nodes(2);
    const auto options = [&](const std::string& token) {
      return token.empty() ? std::vector<std::string>()
                           : std::vector<std::string>{token_option(nodes, token)};
    };
    Program& lead = nodes.start(0, 1, options(one.leads), {"true"});
    const auto refused = nodes.start(1, 1, options(one.joins), {"true"}).wait();
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_THAT(refused.err, HasSubstr(one.what));
    EXPECT_THAT(refused.err, HasSubstr("error: node 0 at 127.0.0.1:"));
    ASSERT_TRUE(lead.wait_for_err("refused a launcher at 127.0.0.1: "));
    EXPECT_THAT(lead.err(), AllOf(HasSubstr("refused a launcher at 127.0.0.1: "),
                                  HasSubstr(one.what), Not(HasSubstr(kToken))));
    EXPECT_EQ(nodes.start(1, 1, options(one.leads), {"true"}).wait().exit_code, 0);
    EXPECT_EQ(lead.wait().exit_code, 0);
  }
}

TEST(LaunchTokenTest, ARecordedProofIsWorthless) {
  Nodes nodes(2);
  const std::string option = token_option(nodes, kToken);
  Program& lead = nodes.start(0, 1, {option}, {"true"});
  Handshake handshake(Handshake::Side::kClient, kToken);
  const std::string greeting = handshake.begin();
  std::string proof;
  {
    const base::UniqueFd first = connect_to(nodes.port());
    send_to(first, greeting);
    proof = handshake.take(receive_line(first));
    send_to(first, proof);
    EXPECT_EQ(handshake.take(receive_line(first)), "");
    EXPECT_TRUE(handshake.is_done()) << handshake.failure();
  }
  const base::UniqueFd second = connect_to(nodes.port());
  send_to(second, greeting + proof + hello("replayer"));
  EXPECT_THAT(receive_line(second), HasSubstr("challenge "));
  EXPECT_THAT(receive_line(second), HasSubstr("refused its token"));
  ASSERT_TRUE(lead.wait_for_err("refused a launcher at 127.0.0.1: its token"));
  EXPECT_THAT(lead.err(), Not(HasSubstr("replayer")));
  EXPECT_EQ(nodes.start(1, 1, {option}, {"true"}).wait().exit_code, 0);
  EXPECT_EQ(lead.wait().exit_code, 0);
}

TEST(LaunchTokenTest, NoStrangerMakesAnElasticJobStartAgain) {
  Nodes nodes(1);
  Program lead(launch_command({"--nnodes=1:2", "--rdzv_backend=c10d",
                               fmt::format("--rdzv_endpoint=127.0.0.1:{}", nodes.port()),
                               "--rdzv_conf=last_call_timeout=0", token_option(nodes, kToken), "sh",
                               "-c", "touch up0; while [ ! -e go ]; do sleep 0.01; done"}),
               {.cwd = nodes.folder().path()});
  ASSERT_TRUE(lead.wait_until([&] { return nodes.has("up0"); })) << lead.err();
  for (int joined = 1; joined <= 3; ++joined) {
    const base::UniqueFd stranger = connect_to(nodes.port());
    send_to(stranger, kAgentGreeting + hello("stranger"));
    ASSERT_TRUE(lead.wait_until(
        [&] { return count(lead.err(), "it has no token, and this job needs one") == joined; }));
  }
  nodes.folder().write("go", "");
  const auto result = lead.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, AllOf(Not(HasSubstr("starting again")), Not(HasSubstr("stranger"))));
}

// A stranger at the master's address that does not know the token gets only a greeting.
TEST(LaunchTokenTest, AStrangerInPlaceOfNodeZeroIsRefused) {
  Handshake launcher(Handshake::Side::kClient, kToken);
  launcher.begin();
  EXPECT_THAT(launcher.take("challenge " + std::string(64, 'a')), HasSubstr("proof "));
  EXPECT_EQ(launcher.take("proof " + std::string(64, 'b')), "");
  EXPECT_FALSE(launcher.is_done());
  EXPECT_THAT(launcher.failure(), HasSubstr("is another"));
  Handshake other(Handshake::Side::kClient, kToken);
  other.begin();
  EXPECT_EQ(other.take(R"({"type":"welcome"})"), "");
  EXPECT_FALSE(other.is_done());
}

/// The seals of both ends of a new connection: first the launcher's, then the coordinator's.
std::pair<std::unique_ptr<MessageSeal>, std::unique_ptr<MessageSeal>> seals_of_connection() {
  Handshake launcher(Handshake::Side::kClient, kToken);
  Handshake coordinator(Handshake::Side::kServer, kToken);
  std::string line = launcher.begin();
  for (Handshake* side = &coordinator; !line.empty();) {
    line = side->take(line.substr(0, line.size() - 1));
    side = side == &coordinator ? &launcher : &coordinator;
  }
  EXPECT_TRUE(launcher.is_done() && coordinator.is_done());
  return {launcher.protection(), coordinator.protection()};
}

TEST(LaunchTokenTest, ASealProvesTextOrderAndSender) {
  auto [launcher, coordinator] = seals_of_connection();
  const std::string first = launcher->seal("one");
  const std::string second = launcher->seal("two");
  EXPECT_EQ(coordinator->open(second), std::nullopt);  // reordered, or the first one was dropped
  EXPECT_EQ(coordinator->open(first), "one");
  EXPECT_EQ(coordinator->open(first), std::nullopt);  // repeated
  for (size_t at = 0; at < second.size(); ++at) {
    std::string changed = second;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    EXPECT_EQ(coordinator->open(changed), std::nullopt) << at;
  }
  EXPECT_EQ(coordinator->open("two"), std::nullopt);
  EXPECT_EQ(launcher->open(first), std::nullopt);  // sent back to where it came from
  EXPECT_EQ(coordinator->open(second), "two");
  auto [of_launcher, of_coordinator] = seals_of_connection();
  EXPECT_EQ(of_coordinator->open(first), std::nullopt);  // from another connection
}

/// Passes lines from one socket to another until either ends, as a man in the middle who changes
/// the line with this number, counted from 0; -1: none.
void pass_on(const base::UniqueFd& from, const base::UniqueFd& to, int attacked) {
  for (int number = 0;; ++number) {
    std::string line = receive_line(from);
    if (line.empty()) break;
    if (number == attacked) line[line.size() - 2] ^= 1;
    if (!send_to(to, line + "\n")) break;
  }
  ::shutdown(from.get(), SHUT_RDWR);
  ::shutdown(to.get(), SHUT_RDWR);
}

TEST(LaunchTokenTest, AManInTheMiddleIsNoticedOnEitherSide) {
  for (const bool attacks_launcher : {true, false}) {
    Nodes nodes(2);
    const std::vector<std::string> options{
        token_option(nodes, kToken),
        "--rdzv_conf=keep_alive_interval=1,keep_alive_max_attempt=100"};
    Program& lead = nodes.start(0, 1, options, until_go());
    const int port = free_port();
    const base::UniqueFd listener = launch::listen_on(port, "127.0.0.1");
    Program& joins =
        nodes.start(1, 1, options + Words{fmt::format("--master_port={}", port)}, until_go());
    const base::UniqueFd launcher(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const base::UniqueFd coordinator = connect_to(nodes.port());
    // Two lines belong to the handshake; hello or welcome is the third one.
    constexpr int kAttacked = 4;
    std::jthread down([&] { pass_on(coordinator, launcher, attacks_launcher ? kAttacked : -1); });
    pass_on(launcher, coordinator, attacks_launcher ? -1 : kAttacked);
    down.join();
    EXPECT_THAT((attacks_launcher ? joins : lead).wait().err,
                HasSubstr("sent a message that is damaged or not its own"));
    EXPECT_EQ(lead.wait().exit_code, 75);
    EXPECT_EQ(joins.wait().exit_code, 75);
  }
}

/// What is wrong with the token of a file and of the variable; "" if it is right.
std::string fault_of_token(const std::string& file, const std::string& variable = "") {
  const Environment environment("SYNCBN_TOKEN", variable);
  try {
    EXPECT_EQ(launch::read_token(file), kToken);
  } catch (const base::UserError& error) {
    return error.what();
  }
  return "";
}

TEST(LaunchTokenTest, WhatIsNoTokenIsNamed) {
  const TempFolder folder;
  const auto fault = [&](const std::string& token, unsigned mode = 0600) {
    const std::string path = folder.write("token", token + "\n");
    std::filesystem::permissions(path, std::filesystem::perms(mode));
    return fault_of_token(path);
  };
  EXPECT_EQ(fault(kToken), "");
  for (const unsigned mode : {0644U, 0640U, 0604U, 0660U}) {
    EXPECT_THAT(fault(kToken, mode),
                HasSubstr(fmt::format("others can read it (mode {:03o}); chmod 600", mode)));
  }
  EXPECT_THAT(fault("short"), HasSubstr("a token has 16 to 4096 bytes, and this one has 5"));
  EXPECT_THAT(fault(std::string(10000, 'x')), HasSubstr("16 to 4096 bytes, and this one has more"));
  EXPECT_THAT(fault_of_token("/no/such/file"),
              HasSubstr("--token_file=/no/such/file: No such file"));
  EXPECT_THAT(fault_of_token("/dev/zero"), HasSubstr("--token_file=/dev/zero: it is no file"));
  const std::string fifo = folder / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_THAT(fault_of_token(fifo), HasSubstr("16 to 4096 bytes, and this one has 0"));
  fault(kToken);
  const std::string file = folder / "token";
  EXPECT_EQ(fault_of_token(file, std::string(kToken) + "\n"), "");
  EXPECT_THAT(fault_of_token(file, std::string(kToken) + "x"),
              AllOf(HasSubstr(file + " and the variable SYNCBN_TOKEN hold different tokens"),
                    Not(HasSubstr(kToken))));
}

// As a process substitution or a service manager passes it.
TEST(LaunchTokenTest, AnInheritedDescriptorIsATokenFile) {
  launch::Pipe pipe = launch::Pipe::make();
  const std::string text = std::string(kToken) + "\n";
  ASSERT_EQ(::write(pipe.writer.get(), text.data(), text.size()), std::ssize(text));
  pipe.writer.reset();
  EXPECT_EQ(fault_of_token(fmt::format("/dev/fd/{}", pipe.reader.get())), "");
}

// Node 0 drops newcomers when strangers hold too many connections.
TEST(LaunchTokenTest, ALauncherThatNode0HasDroppedJoinsAgain) {
  Nodes nodes(2);
  const std::string token = token_option(nodes, kToken);
  auto drops = std::make_unique<Listener>(nodes.port());
  Program& joins = nodes.start(1, 1, {token}, {"true"});
  for (int times = 0; times < 2; ++times) {
    const base::UniqueFd dropped(::accept(drops->fd.get(), nullptr, nullptr));
    ASSERT_TRUE(dropped);
  }
  drops.reset();
  Program& leads = nodes.start(0, 1, {token}, {"true"});
  EXPECT_EQ(leads.wait().exit_code, 0);
  const auto result = joins.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
}

TEST(LaunchTokenTest, NeedsOpenSsl) {
  TempFolder folder;
  // The loader fails at the first file of that name.
  for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1"}) folder.write(name, "");
  const std::string path = folder.path().string();
  const auto refused =
      launch({"true"}, {.env = {{"SYNCBN_TOKEN", kToken}, {"LD_LIBRARY_PATH", path}}});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(
      refused.err,
      AllOf(HasSubstr("cannot load OpenSSL's libcrypto.so.3 or libcrypto.so.1.1"),
            HasSubstr("file too short"), HasSubstr("install OpenSSL (Debian's package libssl3)")));
  const auto without_token = launch({"true"}, {.env = {{"LD_LIBRARY_PATH", path}}});
  EXPECT_EQ(without_token.exit_code, 0) << without_token.err;
}

}  // namespace
}  // namespace syncbn::test
