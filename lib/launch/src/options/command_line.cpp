#include "options/command_line.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "options/option_table.h"

namespace syncbn::launch {

std::optional<bool> read_flag(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (text == "0" || text == "false" || text == "off" || text == "no") return false;
  const bool is_number = !text.empty() && text.find_first_not_of("0123456789") == text.npos;
  if (is_number || text == "true" || text == "on" || text == "yes") return true;
  return std::nullopt;
}

CommandLine::CommandLine(const std::vector<config::FieldInfo>& fields,
                         const std::vector<std::string>& words, Environment environment)
    : fields_(fields) {
  // Texts for which torchrun takes an empty value as none, also over an earlier value and that of a
  // variable. An empty number, --hosts= or --token_file= is a mistake: probably a variable of the
  // shell that is not set.
  static const std::vector<std::string> kMayBeEmpty = base::words_of(
      "rdzv_endpoint, rdzv_id, rdzv_conf, role, log_dir, local_addr, local_ranks_filter, "
      "duplicate_stdout_filters, duplicate_stderr_filters, signals_to_handle");
  std::vector<std::string> emptied;
  size_t i = 0;
  while (i < words.size() && words[i].size() > 1 && words[i][0] == '-') {
    const std::string& word = words[i++];
    if (word == "--") break;
    const bool is_letter = word[1] != '-';
    const config::FieldInfo& field = is_letter ? field_of_letter(word) : field_of_name(word);
    // "-r3" or "--redirects=3"; otherwise the value is the next word.
    const size_t before_value = is_letter ? 1 : std::min(word.find('='), word.size());
    std::string value = word.substr(std::min(before_value + 1, word.size()));
    if (!field.is_switch()) {
      const bool is_next = is_letter ? value.empty() : before_value == word.size();
      const bool is_last = is_next && i == words.size();
      if (is_next && !is_last) value = words[i++];
      if (value.empty() && !is_last && std::ranges::count(kMayBeEmpty, field.path) > 0) {
        emptied.push_back(field.path);
        std::erase_if(given_, [&](const Given& one) { return one.name == "--" + field.path; });
        continue;
      }
      if (value.empty()) {
        throw base::UserError(fmt::format("option --{} needs a value", field.path));
      }
    }
    add(field, value);
  }
  program_.assign(words.begin() + static_cast<std::ptrdiff_t>(i), words.end());
  if (environment == Environment::kIsSettled) return;
  // As in torchrun, whose argparse removes these dashes.
  if (program_.size() > 1 && program_[1] == "--") program_.erase(program_.begin() + 1);
  for (const config::FieldInfo& field : fields) {
    for (const std::string& variable : field.environment) {
      const char* value = std::getenv(variable.c_str());
      // Kubeflow's training operator sets torchrun's variable of a flag to the empty string.
      const bool may_be_empty = field.is_switch() && variable.starts_with("PET_");
      if (value == nullptr || (*value == '\0' && !may_be_empty)) continue;
      if (!has("--" + field.path) && std::ranges::count(emptied, field.path) == 0)
        add(field, value, variable);
    }
  }
}

std::vector<std::string> CommandLine::options(const std::vector<std::string>& without) const {
  std::vector<std::string> options;
  for (const Given& given : given_) {
    if (std::ranges::count(without, given.name) > 0) continue;
    options.push_back(given.value.empty() ? given.name : given.name + "=" + given.value);
  }
  return options;
}

bool CommandLine::is_typed(const std::string& name) const {
  const Given* given = find(name);
  return given != nullptr && given->variable.empty();
}

std::string CommandLine::source_of(const std::string& name) const {
  const Given* given = find(name);
  if (given == nullptr || given->variable.empty()) return name;
  return fmt::format("environment variable {}: {}", given->variable, name);
}

void CommandLine::add(const config::FieldInfo& field, std::string value,
                      const std::string& variable) {
  Given& given = given_.emplace_back(Given{"--" + field.path, std::move(value), variable});
  if (!field.is_switch() || given.value.empty()) return;
  const auto on = read_flag(given.value);
  if (!on) {
    throw base::UserError(
        fmt::format("{}: expected true or false, got '{}'", source_of(given.name), given.value));
  }
  given.value = *on ? "true" : "false";
}

const config::FieldInfo& CommandLine::field_of_letter(const std::string& word) const {
  for (const config::FieldInfo& field : fields_) {
    const bool fits = !field.letter.empty() && word.starts_with(field.letter);
    if (fits && (word.size() == 2 || !field.is_switch())) return field;
  }
  const bool is_of_mpirun = word.starts_with("-n");  // -n 4, -np 4
  throw base::UserError(
      fmt::format("unknown option {}; {}", word,
                  is_of_mpirun ? "the number of workers is --nproc_per_node=N, and that of nodes "
                                 "--nnodes=N"
                               : "see syncbn-launch --help all"));
}

const config::FieldInfo& CommandLine::field_of_name(const std::string& word) const {
  std::string typed = word.substr(2, word.find('=') - 2);
  std::ranges::replace(typed, '-', '_');
  throw_if_removed(typed);
  std::vector<const config::FieldInfo*> torchruns;
  std::vector<const config::FieldInfo*> matches;
  std::vector<std::string> names;
  std::vector<std::string> matching_names;
  for (const config::FieldInfo& field : fields_) {
    if (field.path == typed) return field;
    names.push_back(field.path);
    if (typed.empty() || !field.path.starts_with(typed)) continue;
    matches.push_back(&field);
    matching_names.push_back("--" + field.path);
    if (is_torchruns(field)) torchruns.push_back(&field);
  }
  if (torchruns.size() == 1) return *torchruns[0];
  if (matches.size() == 1) return *matches[0];
  if (matches.empty()) {
    const auto nearest = base::nearest(typed, names);
    throw base::UserError(
        fmt::format("unknown option --{}{}; see syncbn-launch --help all", typed,
                    nearest ? fmt::format("; did you mean '--{}'?", *nearest) : ""));
  }
  throw base::UserError(
      fmt::format("option --{} is ambiguous: {}", typed, base::join(matching_names, ", ")));
}

const CommandLine::Given* CommandLine::find(const std::string& name) const {
  const auto found = std::ranges::find(given_, name, &Given::name);
  return found == given_.end() ? nullptr : &*found;
}

}  // namespace syncbn::launch
