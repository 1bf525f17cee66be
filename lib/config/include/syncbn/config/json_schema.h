#pragma once

#include <string>

#include <syncbn/config/schema.h>

namespace syncbn::config {

/// A JSON Schema (draft 2020-12) of the configurations that `schema` describes, for editors: keys,
/// types, bounds, choices, defaults and help. Any value may be a reference such as `${key}`, and
/// `base` names files. No key is required, because a file may get keys from files it is based on.
std::string json_schema(const SchemaBase& schema, const std::string& title);

/// A value as JSON, in one line.
std::string to_json(const Value& value);

}  // namespace syncbn::config
