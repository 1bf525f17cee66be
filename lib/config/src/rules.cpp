#include <syncbn/config/rules.h>

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <utility>

namespace syncbn::config {

Rules& Rules::at_least(double bound) {
  return add("at least", bound, [](double x, double least) { return x >= least; });
}
Rules& Rules::at_most(double bound) {
  return add("at most", bound, [](double x, double most) { return x <= most; });
}
Rules& Rules::above(double bound) {
  return add("above", bound, [](double x, double limit) { return x > limit; });
}
Rules& Rules::below(double bound) {
  return add("below", bound, [](double x, double limit) { return x < limit; });
}
Rules& Rules::length(size_t count) {
  length_ = count;
  return *this;
}
Rules& Rules::one_of(std::vector<std::string> choices) {
  choices_ = std::move(choices);
  return *this;
}
Rules& Rules::unit(std::string text) {
  unit_ = std::move(text);
  return *this;
}
Rules& Rules::required() {
  required_ = true;
  return *this;
}

Rules& Rules::add(const char* relation, double bound, bool (*holds)(double, double)) {
  bounds_.push_back({fmt::format("{} {}", relation, bound), bound, holds});
  return *this;
}

std::string Rules::range() const {
  return length_ ? fmt::format("{} values, each {}", *length_, bounds()) : bounds();
}

std::string Rules::bounds() const {
  if (!choices_.empty()) return "one of " + base::join(choices_, ", ");
  std::vector<std::string> texts;
  for (const Bound& bound : bounds_) texts.push_back(bound.text);
  return base::join(texts, ", ");
}

bool Rules::check(const Value& value, const Mark& mark, const std::string& path,
                  Faults& faults) const {
  if (value.kind == Value::Kind::kList) {
    if (length_ && value.list.size() != *length_) {
      faults.add(mark,
                 fmt::format("{}: must have {} values, got {}", path, *length_, value.list.size()));
      return false;
    }
    return std::all_of(value.list.begin(), value.list.end(),
                       [&](const Value& item) { return check(item, mark, path, faults); });
  }
  if (value.kind != Value::Kind::kScalar) return true;
  if (value.quoted) {
    if (choices_.empty() ||
        std::find(choices_.begin(), choices_.end(), value.scalar) != choices_.end()) {
      return true;
    }
    faults.add(mark, fmt::format("{}: must be {}, got {}{}", path, bounds(), value.str(),
                                 base::did_you_mean(value.scalar, choices_)));
    return false;
  }
  const auto number = base::parse_number<double>(value.scalar);
  const auto is_kept = [&](const Bound& bound) { return bound.holds(*number, bound.bound); };
  if (!number || std::all_of(bounds_.begin(), bounds_.end(), is_kept)) return true;
  faults.add(mark, fmt::format("{}: must be {}, got {}", path, bounds(), value.scalar));
  return false;
}

}  // namespace syncbn::config
