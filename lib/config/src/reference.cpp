#include <syncbn/config/reference.h>

#include <fmt/format.h>

#include <algorithm>

namespace syncbn::config {
namespace {

/// Escapes bars, which would end a table cell.
std::string cell(const std::string& text) {
  std::string out;
  for (const char c : text) out.append(c == '|' ? "\\" : "").append(1, c);
  return out;
}

std::string code(const std::string& text) {
  return text.empty() ? "" : fmt::format("`{}`", cell(text));
}

std::string default_cell(const FieldInfo& field) {
  if (field.required) return "required";
  return code(field.default_value.empty() ? "\"\"" : field.default_value);
}

std::string markdown_heading(const FieldGroup& group) {
  if (group.section.empty()) return "## Top level";
  if (group.only_for.empty()) return "## `" + group.section + "`";
  return "### `" + group.section + "` with `" + group.only_for + "`";
}

}  // namespace

std::vector<FieldGroup> group_fields(const std::vector<FieldInfo>& fields) {
  std::vector<FieldGroup> groups(1);
  for (const FieldInfo& field : fields) {
    const size_t dot = field.path.rfind('.');
    const std::string section = dot == std::string::npos ? "" : field.path.substr(0, dot);
    auto group = std::ranges::find_if(groups, [&](const FieldGroup& g) {
      return g.section == section && g.only_for == field.only_for;
    });
    if (group == groups.end()) group = groups.insert(groups.end(), {section, field.only_for, {}});
    group->fields.push_back(field);
  }
  if (groups.front().fields.empty()) groups.erase(groups.begin());
  return groups;
}

std::string markdown_reference(const std::vector<FieldInfo>& fields) {
  std::string out;
  for (const FieldGroup& group : group_fields(fields)) {
    out += markdown_heading(group) + "\n\n";
    for (const FieldInfo& field : group.fields) {
      for (const auto& [name, help] : field.alternatives) {
        out += fmt::format("- `{}`: {}\n", name, help);
      }
      if (!field.alternatives.empty()) out += "\n";
    }
    out += "| key | type | default | allowed | unit | |\n|---|---|---|---|---|---|\n";
    for (const FieldInfo& field : group.fields) {
      out +=
          fmt::format("| {} | {} | {} | {} | {} | {} |\n", code(field.path), cell(field.type),
                      default_cell(field), cell(field.range), cell(field.unit), cell(field.help));
    }
    out += "\n";
  }
  if (!out.empty()) out.pop_back();
  return out;
}

}  // namespace syncbn::config
