#pragma once

#include <gtest/gtest.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "common/clock.h"

namespace syncbn::launch {

/// A state machine whose test is a table of events and of what it answers.
class StateTable {
 public:
  using Time = Clock::time_point;
  static constexpr Time kBegin{std::chrono::hours(1)};

  virtual ~StateTable() = default;

  /// @param row "SECONDS EVENT; EVENT… => ANSWER | ANSWER…"
  void plays(const std::string& row) {
    if (states_.empty()) states_ = {"[*]", state()};
    std::istringstream words(row);
    double at = 0;
    words >> at >> std::ws;
    now_ = kBegin + std::chrono::milliseconds(static_cast<int64_t>(at * 1000));
    std::string event;
    std::getline(words, event, '=');
    std::vector<std::string> all;
    std::istringstream events(event);
    for (std::string one; std::getline(events, one, ';');) {
      std::istringstream parts(one);
      std::ranges::copy(happens(parts), std::back_inserter(all));
      if (state() != states_.back()) states_.push_back(state());
    }
    const size_t answers = row.find("=> ");
    EXPECT_EQ(base::join(all, " | "), answers == std::string::npos ? "" : row.substr(answers + 3))
        << row;
  }

  /// "Joining --> Running", …
  void add_transitions(std::set<std::string>& all) const {
    for (size_t i = 1; i < states_.size(); ++i) all.insert(states_[i - 1] + " --> " + states_[i]);
  }

 protected:
  /// Passes on one event and returns the answers.
  virtual std::vector<std::string> happens(std::istream& event) = 0;
  virtual std::string state() const = 0;
  static int number_in(std::istream& words, int otherwise) {
    int value = 0;
    return words >> value ? value : otherwise;
  }

  Time now_ = kBegin;

 private:
  std::vector<std::string> states_;
};

/// Plays rows, each machine's after one for its constructor, which begins with a letter. A row that
/// begins with | continues another. Returns the transitions between states.
template <class Machine>
std::set<std::string> play(const std::string& rows) {
  std::set<std::string> transitions;
  std::optional<Machine> machine;
  std::istringstream lines(rows + "\n    nodes 1");
  std::string row;
  for (std::string next; std::getline(lines, next);) {
    next.erase(0, next.find_first_not_of(' '));
    if (next.empty() || next[0] == '/') continue;
    if (next[0] == '|') {
      row += ' ' + next;
      continue;
    }
    if (!row.empty()) machine->plays(row);
    const bool is_machine = next[0] == 'n';
    if (is_machine && machine) machine->add_transitions(transitions);
    row = is_machine ? "" : next;
    if (is_machine) machine.emplace(next);
  }
  return transitions;
}

/// The transitions of the diagram in docs/architecture.md that begins in a state, but for those
/// from a state to itself.
inline std::set<std::string> documented_transitions(const std::string& first_state) {
  std::ifstream file(SYNCBN_SOURCE_DIR "/docs/architecture.md");
  std::set<std::string> transitions;
  for (std::string line; std::getline(file, line);) {
    const bool is_end = line == "```";
    if (is_end && transitions.contains("[*] --> " + first_state)) break;
    if (is_end) transitions.clear();
    line = line.substr(0, line.find(':'));
    line.erase(0, line.find_first_not_of(' '));
    const size_t arrow = line.find(" --> ");
    if (arrow == std::string::npos || line.substr(0, arrow) == line.substr(arrow + 5)) continue;
    transitions.insert(line);
  }
  return transitions;
}

}  // namespace syncbn::launch
