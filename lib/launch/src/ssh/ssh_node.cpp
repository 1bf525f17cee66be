#include "ssh/ssh_node.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>

#include "workers/program.h"

namespace syncbn::launch {
namespace {

base::UniqueFd take_stdin() {
  base::UniqueFd input(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  const base::UniqueFd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!input || !null) base::throw_errno("cannot take over stdin");
  ::dup2(null.get(), STDIN_FILENO);
  return input;
}

NodeJob job_in(const nlohmann::json& message) {
  try {
    return NodeJob::from_json(message);
  } catch (const nlohmann::json::exception&) {
    throw_broken_protocol();
  }
}

void enter(const NodeJob& job) {
  if (::chdir(job.folder.c_str()) != 0) {
    throw base::UserError(
        fmt::format("cannot enter the working directory {}: {}; start from a folder that all "
                    "hosts have",
                    job.folder, std::strerror(errno)));
  }
  for (const auto& [name, value] : job.environment) ::setenv(name.c_str(), value.c_str(), 1);
  // A launcher that a worker starts must not start on all hosts again.
  for (const char* name : {"SYNCBN_HOSTS", "SYNCBN_HOSTFILE"}) ::unsetenv(name);
}

void check_master(const LaunchOptions& options) {
  std::string reason;
  if (options.node_rank == 0 || base::resolve(options.master_addr, 0, reason)) return;
  throw base::UserError(
      fmt::format("the name of node 0, '{}', is not known there ({}); give --master_addr, a name "
                  "or address that all hosts know",
                  options.master_addr, reason));
}

}  // namespace

SshNode::SshNode() : head_(take_stdin()) {}

std::optional<LaunchOptions> SshNode::prepare(
    const std::function<void(const LaunchOptions&)>& check) {
  const NodeJob job = job_in(head_.wait_for("job"));
  mark_ = job.mark;
  LaunchOptions options;
  try {
    options = get_ready(job);
    check(options);
  } catch (const base::Error& error) {
    exit_code_ = error.exit_code();
    say(NodeProblem{exit_code_, error.what()});
    return std::nullopt;
  }
  say(NodeReady{port_ ? port_->port() : 0});
  const int port = number_in(head_.wait_for("go"), "master_port");
  if (port != 0) options.master_port = port;
  return options;
}

LaunchOptions SshNode::get_ready(const NodeJob& job) {
  if (job.version != SYNCBN_VERSION) {
    throw base::UserError(
        fmt::format("syncbn-launch is version {} there, and {} here", SYNCBN_VERSION, job.version));
  }
  enter(job);
  ::setenv("SYNCBN_TOKEN", job.token.c_str(), 1);  // parse_settled_options() removes it
  LaunchOptions options = parse_settled_options(job.words);
  options.message_scope = job.speaks_for_all ? MessageScope::kWholeJob : MessageScope::kOwnWorkers;
  options.colours = job.colours;
  resolve_program(options);
  check_master(options);
  if (options.node_rank == 0 && (options.nnodes.max > 1 || options.master_port)) {
    port_ = hold_port(options.master_port.value_or(0));
  }
  return options;
}

std::string SshNode::ended(int exit_code, const std::string& report) const {
  return node_line(mark_, NodeEnded{.exit_code = exit_code, .report = report});
}

void SshNode::say(const NodeMessage& message) const {
  base::write_stderr(node_line(mark_, message) + "\n");
}

}  // namespace syncbn::launch
