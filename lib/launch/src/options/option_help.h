#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "options/option_table.h"

namespace syncbn::launch {

inline constexpr const char* kUsage = "syncbn-launch [options] program [its arguments ...]";
inline constexpr const char* kSummary =
    "Starts the workers of a distributed training run on this machine and stays with\n"
    "them to their end.";

/// What holds for all options, in lines; and how they are used together.
const char* notes();
struct Example {
  const char* what;
  const char* command;
};
std::vector<Example> examples();

/// What a user is told of an option.
struct OptionFacts {
  std::string name;    ///< "--redirects"
  std::string letter;  ///< "-r", or empty
  std::string type;    ///< "N", "FILE", "static|c10d"; empty: a flag
  std::string help;    ///< lines
  std::string group;
  std::string default_value;  ///< empty: none
  std::string environment;    ///< its variable, or empty
};

/// Every described option, in the order of the help.
std::vector<OptionFacts> option_facts(const CLI::App& app,
                                      const std::vector<OptionSource>& sources);

/// Has CLI11 print --help in our form.
void describe_help(CLI::App& app, const std::vector<OptionSource>& sources);

}  // namespace syncbn::launch
