#pragma once

#include <syncbn/base/atomic_file.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace syncbn::test {

/// The JSON in each line of `text`, or in the lines of one event.
inline std::vector<nlohmann::json> json_lines(const std::string& text,
                                              const std::string& event = "") {
  std::vector<nlohmann::json> found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    auto json = nlohmann::json::parse(line);
    if (event.empty() || json.at("event") == event) found.push_back(std::move(json));
  }
  return found;
}

/// The same for a run's log.
inline std::vector<nlohmann::json> log_of(const std::string& run_dir,
                                          const std::string& event = "") {
  return json_lines(base::read_file(run_dir + "/log.jsonl"), event);
}

}  // namespace syncbn::test
