#pragma once

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <syncbn/config/field_info.h>
#include <syncbn/config/value.h>

namespace syncbn::config {

/// Reads true, 1, on, yes, or false, 0, off, no, in any case; empty for other text. As in torchrun,
/// any number but 0 is true.
std::optional<bool> read_flag(std::string text);

/// How the command line of a program is written.
struct LineRules {
  std::span<const FieldInfo> options;    ///< of the program itself
  std::span<const FieldInfo> keys = {};  ///< of its configuration: `--KEY VALUE` or `KEY=VALUE`
  std::string help = "--help";           ///< what explains the options
  bool has_program = false;              ///< the first word that is no option begins a program
  /// Tags of the options that an abbreviation stands for rather than for others; 0: none is
  /// allowed.
  unsigned abbreviated = 0;
  unsigned may_be_empty = 0;  ///< tags of options for which an empty value counts as not given
  /// What to do about a word that names no option, to append to a message, or "".
  /// @param name "cuda_graph"
  /// @param typed "--cuda-graph"
  std::function<std::string(const std::string& name, const std::string& typed)> advice =
      [](const std::string& /*name*/, const std::string& /*typed*/) { return std::string(); };
};

/// The name that a word begins with: "local_rank" of "--local-rank=2".
std::string name_in(const std::string& word);

/// What an unknown word probably means, to append to a message.
/// @param dashes before the name of a key: "--", or ""
std::string suggestion(const LineRules& rules, const std::string& typed, const std::string& dashes);

/// A command line before CLI11 reads it.
struct SplitLine {
  /// "--name=value", "--name", "--name" and "" for a value left out, and keys as typed:
  /// "key=value".
  std::vector<std::string> options;
  std::vector<std::string> emptied;  ///< "--name" of options that an empty value has reset
  std::vector<std::string> program;  ///< the program's name and all that follows it
};

/// Does what CLI11 cannot: spells abbreviations, letters and dashes as the options' names, and
/// finds the values of keys and the program.
/// @param words without the program's own name
/// @param faults gets unknown and ambiguous options, and missing values
SplitLine split_line(const LineRules& rules, const std::vector<std::string>& words, Faults& faults);

/// The options of a command line and the environment, as CLI11 reads them.
struct OptionValues {
  /// By name, in the order given; of switches only those that are on.
  std::map<std::string, std::vector<std::string>> values;
  std::vector<std::string> remaining;  ///< words that are no options
};

/// @param words as of split_line()
/// @param faults gets values that their options refuse: "--nnodes: …"
/// @param variables for options that are not among the words: the variables that set them, by name
OptionValues read_options(std::span<const FieldInfo> options, std::vector<std::string> words,
                          Faults& faults, const std::map<std::string, std::string>& variables = {});

}  // namespace syncbn::config
