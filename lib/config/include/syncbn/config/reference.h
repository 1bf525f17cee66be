#pragma once

#include <string>
#include <vector>

#include <syncbn/config/schema.h>

namespace syncbn::config {

/// The fields of one section, or of one alternative of a section.
struct FieldGroup {
  std::string section;             ///< "optimizer"; empty: the top level
  std::vector<std::string> types;  ///< alternatives that have these fields; empty: no type
  std::vector<FieldInfo> fields;
};

/// Groups in the order of their first fields, the top level first. Alternatives with the same
/// fields are one group.
std::vector<FieldGroup> group_fields(const std::vector<FieldInfo>& fields);

/// Each field once: fields that the same alternatives have are one group. Groups of no type come
/// first, then those of the most alternatives.
std::vector<FieldGroup> group_fields_once(const std::vector<FieldInfo>& fields);

/// Markdown with a heading and a table for each group.
std::string markdown_reference(const std::vector<FieldInfo>& fields);

}  // namespace syncbn::config
