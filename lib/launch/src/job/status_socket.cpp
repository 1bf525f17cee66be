#include "job/status_socket.h"

#include <fmt/format.h>
#include <poll.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <utility>

#include "common/json_messages.h"
#include "job/flight_file.h"
#include "job/worker_state.h"

namespace syncbn::launch {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxClients = 16;
constexpr int kMaxProgram = 200;  // columns of the line that names it
constexpr std::chrono::seconds kPatience{5};

// "syncbn-launch/pid:[4026531836]/4242"
std::string socket_name(std::string_view question, pid_t pid) {
  std::error_code ignored;
  const auto name_space = std::filesystem::read_symlink("/proc/self/ns/pid", ignored);
  return fmt::format("{}{}/{}", question, name_space.string(), pid);
}

// The user at the other end.
std::optional<uid_t> user_of(int fd) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return std::nullopt;
  return peer.uid;
}

// Lines of /proc/net/unix end with the socket's name, "@" in place of the 0.
std::set<pid_t> launchers() {
  std::set<pid_t> pids;
  std::ifstream file("/proc/net/unix");
  for (std::string line; std::getline(file, line);) {
    const auto pid = base::parse_number<pid_t>(line.substr(line.rfind('/') + 1));
    if (pid && line.ends_with("@" + socket_name(StatusServer::kStatus, *pid))) pids.insert(*pid);
  }
  return pids;
}

// Any user can take an abstract address: asks only launchers of this user, or all if run by root.
base::UniqueFd connect_to(std::string_view question, pid_t pid) {
  base::UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  const socklen_t size = socket_address(question, pid, address);
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) return {};
  const auto user = user_of(fd.get());
  return user && (*user == ::geteuid() || ::geteuid() == 0) ? std::move(fd) : base::UniqueFd();
}

// Asks all at once, so that a stopped launcher does not use up the time of the others.
std::map<pid_t, base::Channel> ask(std::string_view question, const std::set<pid_t>& pids) {
  std::map<pid_t, base::Channel> all;
  for (const pid_t pid : pids) {
    if (base::UniqueFd fd = connect_to(question, pid)) all.emplace(pid, std::move(fd));
  }
  const auto deadline = Clock::now() + kPatience;
  while (Clock::now() < deadline) {
    std::vector<pollfd> polls;
    for (const auto& [pid, channel] : all) {
      if (!channel.has_ended()) polls.push_back({channel.fd(), POLLIN, 0});
    }
    if (polls.empty()) break;
    ::poll(polls.data(), polls.size(), base::milliseconds_until(deadline));
    for (auto& [pid, channel] : all) {
      if (!channel.has_ended()) channel.receive();
      if (channel.input().size() > FlightFile::kMaxBytes) channel.fail(EMSGSIZE);
    }
  }
  return all;
}

}  // namespace

StatusServer::StatusServer(std::string_view question)
    : listener_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
      spare_(open_spare()) {
  sockaddr_un address{};
  const socklen_t size = socket_address(question, ::getpid(), address);
  if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      ::listen(listener_.get(), kMaxClients) != 0 || !watched_.try_add(listener_.get())) {
    listener_.reset();
  }
}

bool StatusServer::handle() {
  flush_answers();
  base::UniqueFd one(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!one && (errno == EMFILE || errno == ENFILE)) drop_connection(listener_.get(), spare_);
  const auto user = user_of(one.get());
  if (!user || (*user != ::geteuid() && *user != 0) || clients_.size() >= kMaxClients) return false;
  clients_.push_back({base::Channel(std::move(one), FlightFile::kMaxBytes), std::nullopt});
  return true;
}

void StatusServer::answer(const std::string& text) {
  for (auto& [channel, deadline] : clients_) {
    if (deadline) continue;
    deadline = Clock::now() + kPatience;
    channel.queue(text);
    watched_.try_add(channel.fd(), EPOLLOUT);
  }
  flush_answers();
}

void StatusServer::flush_answers() {
  std::erase_if(clients_, [this, now = Clock::now()](Client& client) {
    client.channel.flush();
    const bool is_done =
        client.deadline && (client.channel.unsent() == 0 || now > *client.deadline);
    // A keeper that is starting has copies of the descriptors, so closing them is not enough.
    if (is_done) watched_.remove(client.channel.fd());
    return is_done;
  });
}

socklen_t socket_address(std::string_view question, pid_t pid, sockaddr_un& address) {
  address.sun_family = AF_UNIX;
  const std::string name = socket_name(question, pid);
  name.copy(address.sun_path + 1, sizeof(address.sun_path) - 1);  // the first byte is 0
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

std::string status_text(const RunContext& context, const std::string& state, const Status& status) {
  return json_line(Json(JobStatus{status, context.run_id, context.job_id, ::getpid(),
                                  context.attempt, context.nodes, state, context.program}));
}

std::string JobStatus::in_words() const {
  // With --standalone both names are the same.
  std::string text =
      fmt::format("job {}{}, launcher {}, attempt {}, {}: {}\nprogram: {}\n", run_id,
                  run_id == job_id ? "" : fmt::format(" ({})", job_id), pid, attempt,
                  base::counted(nodes, "node"), state, base::shortened(program, kMaxProgram));
  for (const ShownText& line : notes) text += line + "\n";
  return workers.empty() ? text : text + table_of(workers);
}

void print_status(const std::string& which) {
  std::set<std::string> shown;
  std::string text;
  std::vector<std::string> others;
  std::vector<std::string> silent;
  for (const auto& [pid, channel] : ask(StatusServer::kStatus, launchers())) {
    if (!channel.has_ended()) {
      silent.push_back(no_answer_from(pid));
      continue;
    }
    try {
      const auto job = parse_json(channel.input()).get<JobStatus>();
      const bool is_meant = which.empty() || which == std::to_string(pid) ||
                            shown_text(which) == job.run_id || which == job.job_id;
      if (!is_meant) {
        others.push_back(fmt::format("job {} (launcher {})", job.run_id, pid));
      } else if (shown.insert(job.job_id).second) {  // all launchers of a job answer the same
        text += (text.empty() ? "" : "\n") + job.in_words();
      }
    } catch (const Json::exception&) {  // not a launcher, or one of another version
    }
  }
  base::write_stdout(text);
  if (!text.empty() && (silent.empty() || !which.empty())) return;
  std::string what;
  if (!which.empty()) {
    what = fmt::format("none of your launchers that answered has PID or job '{}'", which);
    if (!others.empty()) what += "; running: " + base::join(others, ", ");
    if (!silent.empty()) what += "; ";
  }
  // A launcher that does not answer may be the requested one.
  if (!silent.empty()) throw base::UnavailableError(what + base::join(silent, "; "));
  throw base::UserError(what.empty() ? "no syncbn-launch of this user runs on this machine" : what);
}

std::string no_answer_from(pid_t launcher) {
  return fmt::format("launcher {0} does not answer (stopped? kill -CONT {0})", launcher);
}

std::optional<std::string> ask_for_records(pid_t launcher) {
  const auto answers = ask(StatusServer::kRecords, {launcher});
  if (answers.empty()) return "";  // a launcher of one node
  const base::Channel& answer = answers.begin()->second;
  if (!answer.has_ended()) return std::nullopt;
  return std::string(answer.input());
}

}  // namespace syncbn::launch
