#include "job/status_socket.h"

#include <fmt/format.h>
#include <poll.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "job/worker_state.h"

namespace syncbn::launch {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kName = "syncbn-launch/";  // then the process
constexpr size_t kMaxAsking = 16;

base::UniqueFd make_socket() {
  return base::UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
}

// An abstract address: its first byte is 0.
socklen_t address_of(pid_t pid, sockaddr_un& address) {
  address.sun_family = AF_UNIX;
  const std::string name = fmt::format("{}{}", kName, pid);
  name.copy(address.sun_path + 1, sizeof(address.sun_path) - 1);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

void limit_time(int fd, int option) {
  const timeval patience{.tv_sec = 5, .tv_usec = 0};
  ::setsockopt(fd, SOL_SOCKET, option, &patience, sizeof(patience));
}

// Lines of /proc/net/unix end with the socket's name, "@" in place of the 0.
std::set<pid_t> launchers() {
  std::set<pid_t> pids;
  std::ifstream file("/proc/net/unix");
  for (std::string line; std::getline(file, line);) {
    const size_t at = line.find(fmt::format("@{}", kName));
    if (at == line.npos) continue;
    if (const auto pid = base::parse_number<pid_t>(line.substr(at + 1 + kName.size()))) {
      pids.insert(*pid);
    }
  }
  return pids;
}

// The answer of a launcher; discarded if it gives none.
Json ask(pid_t pid) {
  const base::UniqueFd fd = make_socket();
  sockaddr_un address{};
  const socklen_t size = address_of(pid, address);
  limit_time(fd.get(), SO_RCVTIMEO);
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) return {};
  std::string text;
  std::array<char, 65536> buffer;
  for (ssize_t got = 0; (got = ::read(fd.get(), buffer.data(), buffer.size())) > 0;) {
    text.append(buffer.data(), static_cast<size_t>(got));
  }
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

std::string render(const Json& job) {
  std::vector<WorkerState> workers;
  for (const Json& worker : job.at("workers")) workers.push_back(WorkerState::of(worker));
  std::string text = fmt::format(
      "job {} ({}), launcher {}, attempt {}, {}: {}\n", job.at("run_id").get<std::string>(),
      job.at("job_id").get<std::string>(), job.at("pid").get<pid_t>(), job.at("attempt").get<int>(),
      base::counted(job.at("nodes").get<int>(), "node"), job.at("state").get<std::string>());
  for (const Json& node : job.at("silent")) {
    text += fmt::format("{} does not answer\n", node.get<std::string>());
  }
  return workers.empty() ? text : text + table_of(workers);
}

}  // namespace

StatusServer::StatusServer() : listener_(make_socket()) {
  sockaddr_un address{};
  const socklen_t size = address_of(::getpid(), address);
  if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      ::listen(listener_.get(), kMaxAsking) != 0) {
    listener_.reset();
  }
}

bool StatusServer::handle() {
  pollfd ready{fd(), POLLIN, 0};
  if (::poll(&ready, 1, 0) <= 0) return false;
  base::UniqueFd one(::accept4(fd(), nullptr, nullptr, SOCK_CLOEXEC));
  ucred peer{};
  socklen_t size = sizeof(peer);
  const bool is_known = ::getsockopt(one.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
  const bool may_ask = is_known && (peer.uid == ::geteuid() || peer.uid == 0);
  if (!may_ask || asking_.size() >= kMaxAsking) return false;
  asking_.push_back(std::move(one));
  return true;
}

void StatusServer::answer(const std::string& text) {
  for (const base::UniqueFd& one : asking_) {
    limit_time(one.get(), SO_SNDTIMEO);
    std::string_view rest = text;
    while (!rest.empty()) {
      const ssize_t sent = ::send(one.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
      if (sent <= 0) break;
      rest.remove_prefix(static_cast<size_t>(sent));
    }
  }
  asking_.clear();
}

std::string status_text(const RunContext& context, const Json& workers, const std::string& state,
                        const Json& silent) {
  return Json{{"run_id", context.run_id},   {"job_id", context.job_id}, {"pid", ::getpid()},
              {"attempt", context.attempt}, {"nodes", context.nodes},   {"state", state},
              {"workers", workers},         {"silent", silent}}
      .dump(-1, ' ', false, Json::error_handler_t::replace);
}

void print_status(const std::string& which) {
  std::set<std::string> shown;
  std::string text;
  for (const pid_t pid : launchers()) {
    const Json job = ask(pid);
    if (!job.is_object()) continue;
    const bool is_meant = which.empty() || which == std::to_string(pid) ||
                          which == job.value("run_id", "") || which == job.value("job_id", "");
    // Launchers of one job tell the same.
    if (!is_meant || !shown.insert(job.value("job_id", "")).second) continue;
    text += (text.empty() ? "" : "\n") + render(job);
  }
  if (!text.empty()) return base::write_stdout(text);
  throw base::UserError(which.empty()
                            ? "no syncbn-launch of this user runs on this machine"
                            : fmt::format("no syncbn-launch of this user on this machine is "
                                          "process or job '{}'",
                                          which));
}

}  // namespace syncbn::launch
