#include <syncbn/config/json_schema.h>

#include <syncbn/base/text.h>

#include <nlohmann/json.hpp>

namespace syncbn::config {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const Value& value) {
  if (value.kind == Value::Kind::kNull) return nullptr;
  if (value.kind == Value::Kind::kList) {
    Json list = Json::array();
    for (const Value& item : value.list) list.push_back(json_of(item));
    return list;
  }
  if (value.kind == Value::Kind::kMap) {
    Json map = Json::object();
    for (const Value::Member& member : value.members) map[member.key] = json_of(member.value);
    return map;
  }
  if (value.quoted) return value.scalar;
  if (value.scalar == "true" || value.scalar == "false") return value.scalar == "true";
  if (const auto integer = base::parse_number<int64_t>(value.scalar)) return *integer;
  if (const auto number = base::parse_number<double>(value.scalar)) return *number;
  return value.scalar;
}

}  // namespace

std::string json_schema(const SchemaBase& schema, const std::string& title) {
  Definitions definitions;
  const Json body = json_of(schema.json_schema(definitions));
  Json out = {{"$schema", "https://json-schema.org/draft/2020-12/schema"}, {"title", title}};
  out.update(body);
  const Json text = {{"type", "string"}};
  out["properties"]["base"] = {
      {"description", "files that this one is written over, relative to it"},
      {"anyOf", {text, {{"type", "array"}, {"items", text}}}}};
  out["$defs"]["reference"] = {{"type", "string"}, {"pattern", "\\$\\{"}};
  for (const auto& [name, definition] : definitions) out["$defs"][name] = json_of(definition);
  return out.dump(1) + "\n";
}

std::string to_json(const Value& value) {
  return json_of(value).dump();
}

}  // namespace syncbn::config
