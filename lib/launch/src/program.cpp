#include "program.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <sstream>

namespace syncbn::launch {
namespace {

namespace fs = std::filesystem;

bool is_file(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error) && !fs::is_directory(path, error);
}

bool is_executable(const fs::path& path) {
  return is_file(path) && ::access(path.c_str(), X_OK) == 0;
}

ProgramError not_executable(const fs::path& path) {
  return {fmt::format("{} is not executable; chmod +x it, or name its interpreter before it",
                      path.string()),
          base::kExitCannotExecute};
}

std::string find_path(const std::string& name) {
  if (is_executable(name)) return name;
  std::error_code error;
  if (fs::is_directory(name, error)) {
    throw ProgramError(fmt::format("{} is a folder, not a program", name),
                       base::kExitCannotExecute);
  }
  if (fs::exists(name, error)) throw not_executable(name);
  throw ProgramError(fmt::format("program not found: there is no file {}", name),
                     base::kExitNotFound);
}

fs::path launcher_folder() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).parent_path();
}

std::vector<fs::path> path_folders() {
  std::vector<fs::path> folders;
  std::istringstream path(base::env("PATH").value_or("/usr/local/bin:/usr/bin:/bin"));
  // An empty entry is the current folder.
  for (std::string folder; std::getline(path, folder, ':');) {
    folders.emplace_back(folder.empty() ? "." : folder);
  }
  return folders;
}

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return find_path(name);
  std::vector<fs::path> folders = path_folders();
  folders.insert(folders.begin(), launcher_folder());
  std::optional<fs::path> unusable;
  for (const fs::path& folder : folders) {
    const fs::path candidate = folder / name;
    if (is_executable(candidate)) return candidate;
    if (!unusable && is_file(candidate)) unusable = candidate;
  }
  if (unusable) throw not_executable(*unusable);
  std::string hint;
  if (is_file(name)) hint = fmt::format("; to run the file in this folder, write ./{}", name);
  throw ProgramError(fmt::format("program '{}' not found beside syncbn-launch ({}) nor in PATH{}",
                                 name, folders.front().string(), hint),
                     base::kExitNotFound);
}

bool is_python_script(const std::string& name) {
  return fs::path(name).extension() == ".py";
}

}  // namespace

Command resolve_program(const LaunchOptions& options) {
  const std::string& name = options.program.front();
  if (!options.module && (options.no_python || !is_python_script(name))) {
    return {find_program(name), options.program};
  }
  if (!options.module && !is_file(name)) {
    throw ProgramError(fmt::format("program not found: there is no Python script {}", name),
                       base::kExitNotFound);
  }
  const std::string python = base::env("PYTHON_EXEC").value_or("python3");
  Command command{find_program(python), {python, "-u"}};
  if (options.module) command.argv.emplace_back("-m");
  command.argv.insert(command.argv.end(), options.program.begin(), options.program.end());
  return command;
}

}  // namespace syncbn::launch
