#pragma once

#include <string>
#include <vector>

#include <syncbn/config/schema.h>

namespace syncbn::config {

/// Neighbouring fields that belong together: one section, or one alternative of a section.
struct FieldGroup {
  std::string section;   ///< "optimizer"; empty: the top level
  std::string only_for;  ///< "type: sgd", or empty
  std::vector<FieldInfo> fields;
};

/// Fields in the order of their description, the top level first.
std::vector<FieldGroup> group_fields(const std::vector<FieldInfo>& fields);

/// The reference of all keys as Markdown: a heading and a table per group.
std::string markdown_reference(const std::vector<FieldInfo>& fields);

}  // namespace syncbn::config
