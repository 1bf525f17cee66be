#include <syncbn/config/reference.h>

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <tuple>
#include <utility>

namespace syncbn::config {
namespace {

constexpr std::string_view kOnlyFor = "type: ";  // begins FieldInfo::only_for

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

/// "`a`, `b`"
std::string code_list(const std::vector<std::string>& texts) {
  std::string out;
  for (const std::string& text : texts) out += (out.empty() ? "" : ", ") + code(text);
  return out;
}

std::string markdown_heading(const FieldGroup& group) {
  if (group.section.empty()) return "## Top level";
  if (group.types.empty()) return "## `" + group.section + "`";
  std::string first = fmt::format("### `{}` with `type: {}`", group.section, group.types[0]);
  if (group.types.size() == 1) return first;
  return fmt::format("{} and others\n\nFor {}.", first, code_list(group.types));
}

/// A line for each help text: alternatives of one kind share theirs.
std::string markdown_alternatives(const FieldInfo& field) {
  std::vector<std::pair<std::string, std::vector<std::string>>> lines;
  for (const auto& [name, help] : field.alternatives) {
    auto line = std::ranges::find(lines, help, [](const auto& one) { return one.first; });
    if (line == lines.end()) line = lines.insert(lines.end(), {help, {}});
    line->second.push_back(name);
  }
  std::string out;
  for (const auto& [help, names] : lines) out += fmt::format("- {}: {}\n", code_list(names), help);
  return out.empty() ? out : out + "\n";
}

bool is_alike(const FieldInfo& one, const FieldInfo& other) {
  const auto shown = [](const FieldInfo& field) {
    return std::tie(field.path, field.type, field.default_value, field.unit, field.range,
                    field.help, field.required);
  };
  return shown(one) == shown(other);
}

/// A group of this field alone.
FieldGroup group_of(const FieldInfo& field) {
  FieldGroup group{.section = "", .types = {}, .fields = {field}};
  if (const size_t dot = field.path.rfind('.'); dot != field.path.npos) {
    group.section = field.path.substr(0, dot);
  }
  if (!field.only_for.empty()) group.types = {field.only_for.substr(kOnlyFor.size())};
  return group;
}

/// Adds the types or the fields of `one` to the group that is the same, or `one` as a new group.
template <class Part, class Same>
void add_to_groups(FieldGroup one, Part part, std::vector<FieldGroup>& groups, const Same& same) {
  const auto group = std::ranges::find_if(groups, same);
  if (group == groups.end()) return groups.push_back(std::move(one));
  auto& into = (*group).*part;
  into.insert(into.end(), (one.*part).begin(), (one.*part).end());
}

void add_fields(const FieldGroup& one, std::vector<FieldGroup>& groups) {
  add_to_groups(one, &FieldGroup::fields, groups, [&one](const FieldGroup& other) {
    return other.section == one.section && other.types == one.types;
  });
}

/// Makes one group of alternatives with the same fields.
void add_types(const FieldGroup& one, std::vector<FieldGroup>& groups) {
  add_to_groups(one, &FieldGroup::types, groups, [&one](const FieldGroup& other) {
    return !one.types.empty() && !other.types.empty() && other.section == one.section &&
           std::ranges::equal(other.fields, one.fields, is_alike);
  });
}

}  // namespace

std::vector<FieldGroup> group_fields(const std::vector<FieldInfo>& fields) {
  std::vector<FieldGroup> groups(1);
  for (const FieldInfo& field : fields) add_fields(group_of(field), groups);
  if (groups.front().fields.empty()) groups.erase(groups.begin());
  std::vector<FieldGroup> merged;
  for (const FieldGroup& group : groups) add_types(group, merged);
  return merged;
}

std::vector<FieldGroup> group_fields_once(const std::vector<FieldInfo>& fields) {
  std::vector<FieldGroup> of_each;
  for (const FieldInfo& field : fields) add_types(group_of(field), of_each);
  std::vector<FieldGroup> groups;
  for (const FieldGroup& one : of_each) add_fields(one, groups);
  std::ranges::stable_sort(groups, std::ranges::greater(), [](const FieldGroup& group) {
    return group.types.empty() ? std::string::npos : group.types.size();
  });
  return groups;
}

std::string markdown_reference(const std::vector<FieldInfo>& fields) {
  std::string out;
  for (const FieldGroup& group : group_fields(fields)) {
    out += markdown_heading(group) + "\n\n";
    for (const FieldInfo& field : group.fields) out += markdown_alternatives(field);
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
