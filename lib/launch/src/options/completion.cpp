#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <sstream>
#include <string_view>

#include "common/words.h"
#include "completion_script.h"
#include "options/option_help.h"
#include "options/option_table.h"

namespace syncbn::launch {
namespace {

constexpr const char* kHelp = "help";  // the option that a topic may follow

/// The literal words of "N|cpu|gpu": those without capitals.
std::string choices(const std::string& value_name) {
  std::string choices;
  if (value_name.find('|') == value_name.npos) return choices;
  std::istringstream words(value_name);
  for (std::string word; std::getline(words, word, '|');) {
    if (word.find_first_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ") != word.npos) continue;
    choices += (choices.empty() ? "" : " ") + word;
  }
  return choices;
}

/// How the bash script completes an option's value.
std::string kind_for_bash(const config::FieldInfo& option) {
  if (option.path == kHelp) return "topics " + base::join(help_topics(option_fields()), " ");
  if (option.is_switch()) return "flag";
  if (option.value_name == "FILE") return "files";
  if (option.value_name == "FOLDER") return "folders";
  const std::string words = choices(option.value_name);
  return words.empty() ? "other" : "words " + words;
}

/// @param kind as for bash
std::string action_for_zsh(const std::string& kind) {
  constexpr std::string_view kWords = "words ";
  if (kind.starts_with(kWords)) return fmt::format("({})", kind.substr(kWords.size()));
  return kind == "files" ? "_files" : kind == "folders" ? "_files -/" : " ";
}

std::string escaped(std::string_view text, std::string_view special) {
  std::string result;
  for (const char c : text) {
    if (special.find(c) != std::string_view::npos) result += '\\';
    result += c;
  }
  return result;
}

/// Arguments for zsh's _arguments: one for each spelling of the option.
std::string specs_for_zsh(const config::FieldInfo& option) {
  std::vector<std::string> spellings{"--" + option.path};
  std::string dashed = spellings[0];
  std::ranges::replace(dashed, '_', '-');
  if (dashed != spellings[0]) spellings.push_back(dashed);
  if (!option.letter.empty()) spellings.push_back(option.letter);
  std::string help = escaped(option.help, R"(\[]:)");
  std::ranges::replace(help, '\n', ' ');
  std::string specs;
  for (const std::string& spelling : spellings) {
    std::string spec = fmt::format("*{}[{}]", spelling, help);
    if (option.path == kHelp) {
      spec += fmt::format("::topic:({})", base::join(help_topics(option_fields()), " "));
    } else if (!option.is_switch()) {
      // "--x=": the value follows "=" or is the next word; "-r+": it follows directly or is the
      // next word.
      spec = fmt::format("*{}{}[{}]:{}:{}", spelling, spelling.starts_with("--") ? "=" : "+", help,
                         escaped(option.value_name, ":"), action_for_zsh(kind_for_bash(option)));
    }
    specs += fmt::format("    {} \\\n", in_single_quotes(spec));
  }
  return specs;
}

}  // namespace

std::string bash_completion(const std::vector<config::FieldInfo>& options) {
  std::string names;
  std::string kinds;
  std::string letters;
  for (const config::FieldInfo& option : options) {
    names += fmt::format("  --{}\n", option.path);
    kinds += fmt::format("    --{}) kind='{}' ;;\n", option.path, kind_for_bash(option));
    if (option.letter.empty()) continue;
    letters += fmt::format("    {}*) name=--{} ;;\n", option.letter, option.path);
  }
  return fmt::format(
      "# bash completion for syncbn-launch, made by `syncbn-launch --completion bash`.\n\n"
      "_syncbn_launch_options='\n{}'\n\n"
      "_syncbn_launch_kind() {{\n  case $1 in\n{}    *) kind=other ;;\n  esac\n}}\n\n"
      "_syncbn_launch_letter() {{\n  case $1 in\n{}    *) return 1 ;;\n  esac\n}}\n{}",
      names, kinds, letters, kCompletionScript);
}

std::string zsh_completion(const std::vector<config::FieldInfo>& options) {
  std::string specs;
  for (const config::FieldInfo& option : options) specs += specs_for_zsh(option);
  return fmt::format(
      "#compdef syncbn-launch\n"
      "# zsh completion for syncbn-launch, made by `syncbn-launch --completion zsh`.\n\n"
      "_syncbn-launch() {{\n"
      "  _arguments -S -A '-*' \\\n{}"
      "    '(-):program:_syncbn-launch_programs' \\\n"
      "    '*::its arguments:_normal'\n"
      "}}\n\n"
      "_syncbn-launch_programs() {{\n"
      "  _alternative 'commands:command:_command_names -e' 'files:file:_files'\n"
      "}}\n\n"
      "_syncbn-launch \"$@\"\n",
      specs);
}

}  // namespace syncbn::launch
