#include "commands/sweep_plan.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cctype>
#include <set>
#include <string_view>
#include <utility>

namespace syncbn::train {
namespace {

constexpr size_t kMaxRuns = 1000;
constexpr size_t kMaxName = 200;  // file systems allow 255 bytes

/// A key and its values.
struct Axis {
  std::string option;  ///< as it was written: "--seed"
  std::vector<std::string> values;

  std::string key() const {
    std::string name = option.substr(std::min(option.find_first_not_of('-'), option.size()));
    std::ranges::replace(name, '-', '_');
    return name;
  }
};

/// Whether a word is KEY=VALUE, so that it cannot be the value of the option before it.
bool is_setting(std::string_view word) {
  const auto is_of_key = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-' || c == '.';
  };
  const auto end = std::ranges::find_if_not(word, is_of_key);
  return end != word.begin() && end != word.end() && *end == '=';
}

/// Splits at commas outside of brackets and quotes.
std::vector<std::string> split_values(const std::string& option, std::string_view text) {
  std::vector<std::string> values(1);
  int depth = 0;
  char quote = 0;
  for (const char c : text) {
    if (quote != 0) {
      if (c == quote) quote = 0;
    } else if (c == '"' || c == '\'') {
      quote = c;
    } else if (c == '[' || c == '{') {
      ++depth;
    } else if (c == ']' || c == '}') {
      --depth;
    } else if (c == ',' && depth == 0) {
      values.emplace_back();
      continue;
    }
    values.back() += c;
  }
  const bool has_comma = text.find(',') != text.npos;
  if (has_comma && (depth != 0 || quote != 0)) {
    throw base::UserError(
        fmt::format("sweep: {}: brackets or quotes do not match in '{}'", option, text));
  }
  return values;
}

/// Appends A, A + 1, ..., B for "A..B", and any other value as it is.
void expand(const std::string& option, const std::string& value, std::vector<std::string>& out) {
  const size_t dots = value.find("..");
  const auto first = base::parse_number<int64_t>(value.substr(0, dots));
  const auto last =
      dots == value.npos ? std::nullopt : base::parse_number<int64_t>(value.substr(dots + 2));
  if (!first || !last) {
    out.push_back(value);
    return;
  }
  if (*first > *last) {
    throw base::UserError(fmt::format(
        "sweep: {}: the range {} has no number; write the smaller one first", option, value));
  }
  for (int64_t number = *first; number <= *last && out.size() <= kMaxRuns; ++number) {
    out.push_back(std::to_string(number));
  }
}

Axis axis_of(const std::string& option, const std::string& text) {
  Axis axis{.option = option, .values = {}};
  for (const std::string& value : split_values(option, text)) {
    if (value.empty() && !text.empty()) {
      throw base::UserError(fmt::format("sweep: {}: an empty value in '{}'", option, text));
    }
    expand(option, value, axis.values);
  }
  return axis;
}

void check(const Axis& axis, const std::vector<Axis>& former) {
  const std::string key = axis.key();
  // keep_best: results by two metrics have no common order.
  if (key == "run_dir" || key == "resume" || key == "overwrite" || key == "config" ||
      key == "nproc_per_node" || key.starts_with("checkpoint.keep_best")) {
    throw base::UserError(fmt::format("sweep: {} cannot have several values", axis.option));
  }
  if (std::ranges::find(former, key, &Axis::key) != former.end()) {
    throw base::UserError(fmt::format("sweep: {} has several values twice", key));
  }
}

/// Replaces characters that file names should not have. Keeps characters beyond ASCII.
std::string file_name(std::string text) {
  for (char& c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool is_plain = std::isalnum(byte) != 0 || byte >= 0x80 ||
                          std::string_view("._-+=,").find(c) != std::string_view::npos;
    if (!is_plain) c = '_';
  }
  return text;
}

SweepPlan::Run run_of(const std::vector<Axis>& axes, const std::vector<size_t>& places) {
  SweepPlan::Run run;
  std::vector<std::string> parts;
  for (size_t i = 0; i < axes.size(); ++i) {
    const std::string& value = axes[i].values[places[i]];
    run.values.push_back(value);
    run.settings.push_back(axes[i].option + "=" + value);
    parts.push_back(axes[i].key() + "=" + value);
  }
  const std::string whole = base::join(parts, ",");
  run.folder = file_name(whole);
  if (run.folder.size() > kMaxName) {
    base::Fnv1a hash;
    hash.add_bytes(whole);
    run.folder = fmt::format("{}-{:016x}", run.folder.substr(0, kMaxName - 17), hash.value());
  }
  return run;
}

/// Moves to the next combination. Returns false after the last.
bool move_on(const std::vector<Axis>& axes, std::vector<size_t>& places) {
  for (size_t i = axes.size(); i-- > 0;) {
    if (++places[i] < axes[i].values.size()) return true;
    places[i] = 0;
  }
  return false;
}

}  // namespace

std::string SweepPlan::label(const Run& run) const {
  std::vector<std::string> parts;
  for (size_t i = 0; i < keys.size(); ++i) parts.push_back(keys[i] + "=" + run.values[i]);
  return base::join(parts, " ");
}

SweepPlan plan_sweep(const std::vector<std::string>& args) {
  SweepPlan plan;
  std::vector<Axis> axes;
  std::vector<Axis> fixed;
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& word = args[i];
    const size_t equals = word.find('=');
    const bool takes_next = equals == word.npos && word.starts_with("--") && i + 1 < args.size() &&
                            !args[i + 1].starts_with("--") && !is_setting(args[i + 1]);
    if (equals == word.npos && !takes_next) {
      plan.arguments.push_back(word);
      continue;
    }
    const std::string text = takes_next ? args[i + 1] : word.substr(equals + 1);
    Axis axis = axis_of(word.substr(0, equals), text);
    if (axis.values.size() == 1) {
      // A range of one number is that number.
      const bool is_range = axis.values.front() != text;
      plan.arguments.push_back(is_range ? axis.option + "=" + axis.values.front() : word);
      if (takes_next && !is_range) plan.arguments.push_back(text);
      fixed.push_back(std::move(axis));
    } else {
      check(axis, axes);
      axes.push_back(std::move(axis));
    }
    if (takes_next) ++i;
  }
  if (axes.empty()) {
    throw base::UserError(
        "sweep: no key has several values; give it some, as in optimizer.lr=0.05,0.1 or seed=0..2");
  }
  size_t count = 1;
  for (const Axis& axis : axes) {
    if (std::ranges::find(fixed, axis.key(), &Axis::key) != fixed.end()) {
      throw base::UserError(
          fmt::format("sweep: {} has several values, and a single one as well", axis.key()));
    }
    plan.keys.push_back(axis.key());
    count *= axis.values.size();
    if (count > kMaxRuns) {
      throw base::UserError(fmt::format(
          "sweep: more than {} runs; give fewer values, or make several sweeps", kMaxRuns));
    }
  }
  std::set<std::string> folders;
  std::vector<size_t> places(axes.size());
  do {
    plan.runs.push_back(run_of(axes, places));
    if (!folders.insert(plan.runs.back().folder).second) {
      throw base::UserError(
          fmt::format("sweep: two runs would write to the same folder, {}; give each value once",
                      plan.runs.back().folder));
    }
  } while (move_on(axes, places));
  return plan;
}

}  // namespace syncbn::train
