#include <syncbn/config/help_lines.h>

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <sstream>
#include <vector>

namespace syncbn::config {

std::string wrapped(const std::string& text, size_t indent, size_t columns) {
  std::string out;
  size_t column = indent;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (!out.empty() && column + 1 + word.size() > columns) {
      out.append(1, '\n').append(indent, ' ');
      column = indent;
    } else if (!out.empty()) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
  }
  return out;
}

std::string help_line(const std::string& name, const std::string& text, size_t columns) {
  constexpr size_t kColumn = 28;  // of the text
  if (text.empty()) return fmt::format("  {}\n", name);
  // If the name is too long for its column, the text starts on the next line.
  const std::string gap = name.size() + 2 >= kColumn ? "\n" + std::string(kColumn, ' ') : "";
  return fmt::format("  {:<{}}{}{}\n", name, kColumn - 2, gap, wrapped(text, kColumn, columns));
}

std::string help_line(const std::string& name, const FieldInfo& field, size_t columns) {
  std::vector<std::string> notes;
  if (!field.range.empty()) notes.push_back(field.range);
  if (!field.unit.empty()) notes.push_back("in " + field.unit);
  if (field.required) {
    notes.emplace_back("required");
  } else if (!field.default_value.empty()) {
    notes.push_back("default " + field.default_value);
  }
  if (!field.environment.empty()) notes.push_back("environment " + field.environment.front());
  const std::string note = notes.empty() ? "" : " (" + base::join(notes, "; ") + ")";
  return help_line(name, field.help + note, columns);
}

std::string option_lines(std::span<const FieldInfo> options, size_t columns) {
  std::string lines;
  std::string group;
  for (const FieldInfo& option : options) {
    if (option.group != group) lines += fmt::format("\n{}:\n", option.group);
    group = option.group;
    std::string name = option.letter + (option.letter.empty() ? "--" : ",--") + option.path;
    if (!option.value_name.empty()) name += " " + option.value_name;
    lines += help_line(name, option, columns);
  }
  return lines;
}

}  // namespace syncbn::config
