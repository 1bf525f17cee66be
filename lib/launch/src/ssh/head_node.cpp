#include "ssh/head_node.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <utility>

#include "common/descriptors.h"
#include "common/processes.h"
#include "job/run_context.h"
#include "workers/program.h"

namespace syncbn::launch {
namespace {

// The exit code of ssh when ssh itself failed.
constexpr int kSshFailed = 255;

}  // namespace

WorkerSpec HeadNode::connect(const std::vector<std::string>& words,
                             std::vector<base::UniqueFd>& theirs) {
  Pipe in_pipe = Pipe::make();
  Pipe out_pipe = Pipe::make();
  Pipe err_pipe = Pipe::make();
  WorkerSpec spec{.file = find_program(words[0]),
                  .argv = words,
                  .env = merge_environment({}),
                  .stdin_fd = in_pipe.reader.get(),
                  .stdout_fd = out_pipe.writer.get(),
                  .stderr_fd = err_pipe.writer.get()};
  for (base::UniqueFd* fd : {&in_pipe.reader, &out_pipe.writer, &err_pipe.writer}) {
    theirs.push_back(std::move(*fd));
  }
  in = base::Channel(std::move(in_pipe.writer));
  out = std::move(out_pipe.reader);
  err = std::move(err_pipe.reader);
  for (const base::UniqueFd* fd : {&out, &err}) set_nonblocking(*fd);
  return spec;
}

bool HeadNode::is_lost_connection(int wait_status) const {
  return !is_here && (exit_code_of(wait_status) == kSshFailed || WIFSIGNALED(wait_status));
}

std::string HeadNode::describe_end(int wait_status, const std::string& launcher,
                                   const std::string& command) const {
  const std::string last = last_words.empty() ? "" : fmt::format(": {}", last_words);
  const int code = exit_code_of(wait_status);
  if (start_error) return fmt::format("cannot be started: {}", base::describe_errno(*start_error));
  if (code == kSshFailed && !is_here) {
    return last_words.empty() ? "ssh failed without a message" : last_words;
  }
  if (code == base::kExitNotFound || code == base::kExitCannotExecute) {
    return fmt::format("there is no {} to execute (--ssh_launcher){}", launcher, last);
  }
  if (!is_here && !is_launcher_error(code)) {
    return fmt::format("{} has not started the launcher there ({}){}", command,
                       describe_status(wait_status), last);
  }
  return fmt::format("its launcher ended with {}{}", describe_status(wait_status), last);
}

bool is_launcher_error(int exit_code) {
  constexpr std::array kCodes{base::kExitUsage, base::kExitInternal, base::kExitUnavailable,
                              base::kExitCannotExecute, base::kExitNotFound};
  return std::ranges::find(kCodes, exit_code) != kCodes.end();
}

std::string names_of_unanswered(const std::vector<HeadNode>& nodes) {
  std::vector<std::string> names;
  for (const HeadNode& node : nodes) {
    if (node.state == HeadNode::State::kAsked) names.push_back(node.host.full_name());
  }
  return base::join(names, ", ");
}

std::vector<std::string> problem_lines(const std::vector<HeadNode>& nodes) {
  std::vector<std::pair<std::string, std::vector<std::string>>> problems;
  for (const HeadNode& node : nodes) {
    if (!node.problem) continue;
    auto same = std::ranges::find(
        problems, node.problem->what, [](const auto& one) -> const auto& { return one.first; });
    if (same == problems.end()) same = problems.insert(same, {node.problem->what, {}});
    same->second.push_back(node.host.full_name());
  }
  std::vector<std::string> lines;
  lines.reserve(problems.size());
  for (const auto& [what, hosts] : problems) {
    lines.push_back(fmt::format("{}: {}", base::join(hosts, ", "), what));
  }
  return lines;
}

}  // namespace syncbn::launch
