// bin/train: prints help texts that the build has generated; for anything else it executes
// libexec/syncbn/train_program, which takes a quarter of a second to load libtorch.
#include <syncbn/base/signal_mask.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>

#include "help_texts.h"
#include "step/early_signals.h"

namespace {

/// The help that `train ARGUMENTS` asks for; empty if it asks for none.
std::string_view find_help(int argc, char** argv) {
  std::string mark = "\x1e";
  for (int i = 1; i < argc; ++i) mark.append(i > 1 ? " " : "").append(argv[i]);
  if (argc > 1 && std::strcmp(argv[1], "help") == 0) mark.insert(1, "--");
  mark += "\n";
  const size_t begin = syncbn::train::kHelpTexts.find(mark);
  if (begin == std::string_view::npos) return {};
  const std::string_view rest = syncbn::train::kHelpTexts.substr(begin + mark.size());
  return rest.substr(0, rest.find('\x1e'));
}

/// Reports errno. The exit codes are those of docs/errors.md.
int fail(int exit_code, const std::string& what, const char* advice = "") {
  std::fprintf(stderr, "train: error: %s: %s%s\n", what.c_str(), std::strerror(errno), advice);
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  const char* const local_rank = std::getenv("LOCAL_RANK");
  const bool may_print = local_rank == nullptr || std::strcmp(local_rank, "0") == 0;
  if (const auto help = find_help(argc, argv); may_print && !help.empty()) {
    const bool is_written =
        std::fwrite(help.data(), 1, help.size(), stdout) == help.size() && std::fflush(stdout) == 0;
    return is_written ? 0 : fail(75, "cannot write standard output");
  }
  // Without a working directory, libtorch's libraries would be reported as missing.
  std::error_code error;
  if (std::filesystem::current_path(error).empty()) {
    if (!may_print) ::sleep(1);  // local rank 0 reports it
    errno = error.value();
    return may_print ? fail(2, "the working directory is gone; change to another one") : 2;
  }
  const auto here = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  errno = error.value();
  if (error) return fail(126, "cannot read /proc/self/exe");
  const std::string program = (here.parent_path() / "libexec/syncbn/train_program").string();
  const syncbn::base::SignalMask held(SIG_BLOCK, syncbn::train::kEarlySignals);
  ::execv(program.c_str(), argv);
  return fail(126, "cannot execute " + program,
              "; if a build is making it, start again afterwards, otherwise install train again");
}
