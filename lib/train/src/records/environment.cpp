#include "records/environment.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <syncbn/base/cpus.h>
#include <syncbn/base/env.h>
#include <syncbn/base/gpus.h>
#include <syncbn/base/shell.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>
#include <sys/utsname.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>
#include <vector>

#include "common/plugins.h"
#include "common/rank_0.h"
#include "common/revision.h"

namespace syncbn::train {
namespace {

// Ordered: keys stay in the order written, for people who read the file.
using Json = nlohmann::ordered_json;

/// Environment variables in which launchers and schedulers name a job.
constexpr const char* kJobVariables[] = {
    "SYNCBN_JOB_ID", "SYNCBN_ATTEMPT", "TORCHELASTIC_RUN_ID",  "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",  "SLURM_JOB_NAME", "JOB_COMPLETION_INDEX", "OMPI_COMM_WORLD_SIZE"};

/// The words of this process's command line.
std::vector<std::string> command_line() {
  std::ifstream file("/proc/self/cmdline");
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return words;
}

/// The output of a git command, without the last line's end; nothing if it fails.
std::optional<std::string> git(const std::string& arguments) {
  // The working directory may be on a slow file server: wait 5 s at most.
  const auto [exit_code, text] =
      base::run_shell("timeout 5 git --no-optional-locks " + arguments + " 2>/dev/null");
  return exit_code == 0 ? std::optional(text) : std::nullopt;
}

/// The state of the checkout that contains the working directory; null outside of one.
Json git_state() {
  const auto commit = git("rev-parse HEAD");
  if (!commit) return nullptr;
  Json state = {{"commit", *commit}, {"branch", git("rev-parse --abbrev-ref HEAD").value_or("")}};
  const auto status = git("status --porcelain --untracked-files=no");
  if (!status) return state;
  Json changed = Json::array();
  std::istringstream lines(*status);
  for (std::string line; std::getline(lines, line);) changed.push_back(line.substr(3));
  state["changed_files"] = std::move(changed);
  return state;
}

/// The value of the first line "KEY : VALUE" of a file below /proc; empty if there is none.
std::string value_in(const char* file, const std::string& key) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(key)) continue;
    const size_t begin = line.find_first_not_of(" \t", line.find(':') + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

/// "2.28.9" for 22809, the encoding in nccl.h and cudnn.h.
std::string version_text(int64_t version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

/// Empty if this process has not loaded NCCL.
std::string nccl_version() {
  void* const library = ::dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return "";
  const auto get = reinterpret_cast<int (*)(int*)>(::dlsym(library, "ncclGetVersion"));
  int version = 0;
  if (get != nullptr) get(&version);
  ::dlclose(library);
  return version_text(version);
}

Json software() {
  Json all = {{"syncbn", SYNCBN_VERSION},
              {"revision", kRevision},
              {"libtorch", TORCH_VERSION},
#ifdef __clang__
              {"compiler", "Clang " __VERSION__}};
#else
              {"compiler", "GCC " __VERSION__}};
#endif
  for (const Plugin& plugin : loaded_plugins()) all["plugins"][plugin.file] = plugin.sha256;
  if (dist::device().is_cuda()) {
    const auto& hooks = at::detail::getCUDAHooks();
    const auto number = hooks.versionCUDART();  // CUDART_VERSION: 13000 for 13.0
    all["cuda"] = fmt::format("{}.{}", number / 1000, number / 10 % 100);
    all["cudnn"] = version_text(hooks.versionCuDNN());
    all["nccl"] = nccl_version();
  }
  return all;
}

/// The device of this rank, for its host's list.
Json device() {
  const at::Device device = dist::device();
  if (!device.is_cuda()) return "cpu";
  const auto machine = base::machine_gpus();
  const auto visible = base::visible_gpus(machine);
  const auto index = static_cast<size_t>(device.index());
  const base::Gpu* const gpu = index < visible.size() ? visible[index] : nullptr;
  if (gpu == nullptr) return device.str();
  return {{"device", device.str()}, {"address", gpu->address}, {"uuid", gpu->uuid}};
}

/// What this rank knows about its host and itself.
Json own_part() {
  utsname system{};
  ::uname(&system);
  const auto bytes = static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGESIZE);
  return {{"host", base::hostname()},
          {"system", fmt::format("{} {} {}", system.sysname, system.release, system.machine)},
          {"cpu", value_in("/proc/cpuinfo", "model name")},
          {"cpus", ::sysconf(_SC_NPROCESSORS_ONLN)},
          {"memory_bytes", bytes},
          {"rank", Json{{"rank", dist::rank()},
                        {"pid", ::getpid()},
                        {"usable_cpus", base::usable_cpus()},
                        {"threads", at::get_num_threads()},
                        {"device", device()}}}};
}

/// Merges the parts of all ranks by host.
Json hosts_of(const std::vector<std::string>& parts) {
  Json hosts = Json::array();
  for (const std::string& text : parts) {
    Json part = Json::parse(text);
    Json rank = std::exchange(part["rank"], nullptr);
    part.erase("rank");
    auto host = std::ranges::find(hosts, part["host"], [](const Json& one) { return one["host"]; });
    if (host == hosts.end()) {
      part["ranks"] = Json::array();
      hosts.push_back(std::move(part));
      host = std::prev(hosts.end());
    }
    (*host)["ranks"].push_back(std::move(rank));
  }
  return hosts;
}

Json data_set(const data::Dataset& set) {
  return {{"samples", set.size()}, {"fingerprint", fmt::format("{:016x}", set.fingerprint())}};
}

}  // namespace

std::string describe_environment(const Inputs& inputs) {
  constexpr auto kReplace = Json::error_handler_t::replace;  // arguments may not be UTF-8
  const std::vector<std::string> parts =
      dist::all_gather_bytes(own_part().dump(-1, ' ', false, kReplace));
  return on_rank_0([&] {
    std::error_code ignored;
    Json job = Json::object();
    for (const char* variable : kJobVariables) {
      if (const auto value = base::env(variable)) job[variable] = *value;
    }
    const Json all = {{"software", software()},
                      {"command", base::without_secrets(command_line())},
                      {"working_directory", std::filesystem::current_path(ignored).string()},
                      {"git", git_state()},
                      {"job", std::move(job)},
                      {"world_size", dist::world_size()},
                      {"hosts", hosts_of(parts)},
                      {"data", Json{{"train", data_set(*inputs.train_set)},
                                    {to_string(inputs.eval_split), data_set(*inputs.eval_set)}}}};
    return all.dump(2, ' ', false, kReplace) + "\n";
  });
}

}  // namespace syncbn::train
