#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <string_view>

#include "common/words.h"
#include "options/option_help.h"

namespace syncbn::launch {
namespace {

// bash splits words at = and : as well, so the script joins them again. It uses only builtins, and
// does not need bash-completion.
constexpr std::string_view kBash = R"(
# The words before the cursor, and where each begins in COMP_WORDS.
_syncbn_launch_split() {
  local line=$COMP_LINE rest i
  words=() starts=()
  for ((i = 0; i <= COMP_CWORD; ++i)); do
    rest=${line#"${line%%[![:space:]]*}"}
    if ((i > 0)) && [[ $rest == "$line" ]]; then
      words[-1]+=${COMP_WORDS[i]}
    else
      words+=("${COMP_WORDS[i]}")
      starts+=("$i")
    fi
    line=${rest#"${COMP_WORDS[i]}"}
  done
}

# Sets name to an option in full, from what was typed: with dashes, a letter, an abbreviation.
_syncbn_launch_name() {
  local typed=${1%%=*} known
  name=
  _syncbn_launch_letter "$typed" && return
  typed=${typed#--}
  typed=--${typed//-/_}
  for known in $_syncbn_launch_options; do
    if [[ $known == "$typed" ]]; then
      name=$known
      return
    fi
    [[ $known != "$typed"* ]] || name=${name:-$known}
  done
}

_syncbn_launch_offer_options() {
  local offered=$_syncbn_launch_options
  # Whoever types dashes gets dashes.
  [[ ${1#--} != *-* ]] || offered=${offered//_/-}
  mapfile -t COMPREPLY < <(compgen -W "$offered" -- "$1")
}

# $1: the option; $2: the value so far; $3: what stands before it in the same word.
_syncbn_launch_offer_values() {
  local kind
  _syncbn_launch_kind "$1"
  case $kind in
    flag) mapfile -t COMPREPLY < <(compgen -W 'true false' -- "$2") ;;
    files) mapfile -t COMPREPLY < <(compgen -f -- "$2") ;;
    folders) mapfile -t COMPREPLY < <(compgen -d -- "$2") ;;
    words\ *) mapfile -t COMPREPLY < <(compgen -W "${kind#words }" -- "$2") ;;
  esac
  [[ $kind != files && $kind != folders ]] || compopt -o filenames 2>/dev/null
  # Where = does not part words, all of the word is replaced.
  [[ -z $3 || $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${COMPREPLY[@]/#/$3}")
}

_syncbn_launch_offer_programs() {
  mapfile -t COMPREPLY < <(compgen -c -- "$1"; compgen -f -- "$1")
  compopt -o filenames 2>/dev/null
}

# As if the line began with the program, which is COMP_WORDS[$1].
_syncbn_launch_as_program() {
  local offset
  for offset in _comp_command_offset _command_offset; do
    declare -F "$offset" >/dev/null || continue
    "$offset" "$1"
    return
  done
  local i line=$COMP_LINE
  for ((i = 0; i < $1; ++i)); do
    line=${line#*"${COMP_WORDS[i]}"}
  done
  line=${line#"${line%%[![:space:]]*}"}
  local program=${COMP_WORDS[$1]} before=$((${#COMP_LINE} - ${#line}))
  COMP_LINE=$line
  COMP_POINT=$((COMP_POINT - before))
  COMP_WORDS=("${COMP_WORDS[@]:$1}")
  COMP_CWORD=$((COMP_CWORD - $1))
  local spec
  spec=$(complete -p "$program" 2>/dev/null || complete -p "${program##*/}" 2>/dev/null)
  if [[ $spec =~ \ -F\ ([^ ]+) ]]; then
    "${BASH_REMATCH[1]}" "$program" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
  else
    compopt -o bashdefault -o default 2>/dev/null
  fi
}

_syncbn_launch() {
  local words starts name kind word i=1 options_end=
  COMPREPLY=()
  _syncbn_launch_split
  local last=$((${#words[@]} - 1))
  local current=${words[last]}
  while ((i < last)); do
    word=${words[i]}
    [[ $word == -?* ]] || break
    ((++i))
    if [[ $word == -- ]]; then
      options_end=yes
      break
    fi
    _syncbn_launch_name "$word"
    _syncbn_launch_kind "$name"
    # The value is here, or there is none.
    if [[ $word == *=* || $word == -[!-]?* || $kind == flag ]]; then continue; fi
    if ((i == last)); then
      _syncbn_launch_offer_values "$name" "$current"
      return
    fi
    ((++i))
  done
  if ((i < last)); then
    _syncbn_launch_as_program "${starts[i]}"
  elif [[ -z $options_end && $current == --*=* ]]; then
    _syncbn_launch_name "$current"
    _syncbn_launch_offer_values "$name" "${current#*=}" "${current%%=*}="
  elif [[ -z $options_end && $current == -* ]]; then
    _syncbn_launch_offer_options "$current"
  else
    _syncbn_launch_offer_programs "$current"
  fi
}

complete -F _syncbn_launch syncbn-launch
)";

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
  if (option.is_switch()) return "flag";
  if (option.value_name == "FILE") return "files";
  if (option.value_name == "FOLDER") return "folders";
  const std::string words = choices(option.value_name);
  return words.empty() ? "other" : "words " + words;
}

std::string action_for_zsh(const config::FieldInfo& option) {
  if (option.value_name == "FILE") return "_files";
  if (option.value_name == "FOLDER") return "_files -/";
  const std::string words = choices(option.value_name);
  return words.empty() ? " " : fmt::format("({})", words);
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
    if (!option.is_switch()) {
      // "--x=": the value follows "=" or is the next word; "-r+": it follows directly or is the
      // next word.
      spec = fmt::format("*{}{}[{}]:{}:{}", spelling, spelling.starts_with("--") ? "=" : "+", help,
                         escaped(option.value_name, ":"), action_for_zsh(option));
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
      names, kinds, letters, kBash);
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
