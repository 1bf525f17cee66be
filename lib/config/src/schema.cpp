#include <syncbn/config/schema.h>

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <utility>

#include "advised_keys.h"

namespace syncbn::config {

namespace {

bool is_part_of_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}

bool has_word(const std::string& text, const std::string& word) {
  for (size_t at = 0; (at = text.find(word, at)) != text.npos; ++at) {
    const size_t end = at + word.size();
    const bool begins = at == 0 || !is_part_of_word(text[at - 1]);
    if (begins && (end == text.size() || !is_part_of_word(text[end]))) return true;
  }
  return false;
}

std::vector<Value> texts_of(const std::vector<std::string>& texts) {
  std::vector<Value> values;
  values.reserve(texts.size());
  for (const std::string& text : texts) values.push_back(Value::of_text(text));
  return values;
}

/// The place to report for a problem between several keys of a section: that of a key that the
/// message names, preferably one set on the command line.
Mark mark_of(const std::string& problem, const Value& section) {
  const Mark* place = &section.mark;
  for (const Value::Member& member : section.members) {
    if (!has_word(problem, member.key)) continue;
    const bool is_option = member.value.mark.line == 0;
    if (is_option || place == &section.mark) place = &member.value.mark;
    if (is_option) break;
  }
  return *place;
}

}  // namespace

std::string Rules::bounds() const {
  if (!info_.choices.empty()) return "one of " + base::join(info_.choices, ", ");
  std::vector<std::string> texts;
  const auto add = [&](const char* relation, const std::optional<double>& bound) {
    if (bound) texts.push_back(fmt::format("{} {}", relation, *bound));
  };
  add("at least", info_.min);
  add("above", above_);
  add("at most", info_.max);
  add("below", below_);
  return base::join(texts, ", ");
}

void Rules::restrict(Value& schema) const {
  // The rules of `null or a number` apply to the number, and those of a list to its items.
  if (Value* const alternatives = schema.find("anyOf")) return restrict(alternatives->list.front());
  if (length_) {
    const Value length = Value::of_scalar(fmt::format("{}", *length_));
    schema.set("minItems", length);
    schema.set("maxItems", length);
  }
  Value* one = &schema;
  if (Value* const items = schema.find("items")) one = items;
  while (Value* const alternatives = one->find("anyOf")) one = &alternatives->list.front();
  restrict_one(*one);
}

void Rules::restrict_one(Value& schema) const {
  const auto add = [&](const char* key, const std::optional<double>& bound) {
    if (bound) schema.set(key, Value::of_scalar(fmt::format("{}", *bound)));
  };
  add("minimum", info_.min);
  add("exclusiveMinimum", above_);
  add("maximum", info_.max);
  add("exclusiveMaximum", below_);
  if (info_.choices.empty()) return;
  schema.set("enum", detail::list_of(texts_of(info_.choices)));
}

bool Rules::holds(double number) const {
  return number >= info_.min.value_or(number) && number <= info_.max.value_or(number) &&
         !(above_ && number <= *above_) && !(below_ && number >= *below_);
}

bool Rules::check(const Value& value, const Mark& mark, const std::string& path,
                  Faults& faults) const {
  if (value.kind == Value::Kind::kList) {
    if (length_ && value.list.size() != *length_) {
      faults.add(mark,
                 fmt::format("{}: must have {} values, got {}", path, *length_, value.list.size()));
      return false;
    }
    return std::ranges::all_of(value.list,
                               [&](const Value& item) { return check(item, mark, path, faults); });
  }
  if (value.kind != Value::Kind::kScalar) return true;
  const std::vector<std::string>& choices = info_.choices;
  const auto number = base::parse_number<double>(value.scalar);
  const bool is_kept = value.quoted
                           ? choices.empty() || std::ranges::count(choices, value.scalar) > 0
                           : !number || holds(*number);
  if (is_kept) return true;
  const std::string got = value.quoted ? value.str() : value.scalar;
  faults.add(mark, fmt::format("{}: must be {}, got {}{}", path, bounds(), got,
                               base::did_you_mean(value.scalar, choices)));
  return false;
}

std::optional<FieldInfo> find_key(const std::string& name, std::span<const FieldInfo> fields) {
  for (const std::string& path : {name, name + ".type"}) {
    const auto found = std::ranges::find(fields, path, &FieldInfo::path);
    if (found != fields.end()) return *found;
  }
  for (FieldInfo field : fields) {
    if (!field.is_list() || !name.starts_with(field.path + ".")) continue;
    const std::string item = name.substr(field.path.size() + 1);
    if (!base::parse_number<size_t>(item.substr(0, item.find('.')))) continue;
    field.type =
        item.find('.') == item.npos ? field.type.substr(std::strlen("list of ")) : "of an item";
    field.path = name;
    return field;
  }
  return std::nullopt;
}

std::optional<std::string> nearest_key(const std::string& name, std::span<const FieldInfo> fields) {
  std::vector<std::string> paths;
  const size_t dot = name.rfind('.');
  const std::string section = dot == name.npos ? "" : name.substr(0, dot + 1);
  const std::string last = name.substr(section.size());
  for (const FieldInfo& field : fields) {
    if (field.path.ends_with("." + name)) return field.path;
  }
  for (const FieldInfo& field : fields) {
    const bool is_in = section.empty() || field.path.starts_with(section);
    if (is_in && std::ranges::count(field.other_names, last) > 0) return field.path;
    paths.push_back(field.path);
    const std::string section = field.path.substr(0, field.path.find('.'));
    if (section != field.path && std::ranges::count(paths, section) == 0) paths.push_back(section);
  }
  return base::nearest(name, paths);
}

Rules& SchemaBase::add_field(const std::string& name, const std::string& help,
                             detail::FieldType type, const void* member) {
  const ptrdiff_t offset =
      static_cast<const std::byte*>(member) - static_cast<const std::byte*>(defaults());
  Rules& rules = fields_.emplace_back(Field{name, type, offset, {}}).rules;
  rules.info_.help = help;
  rules.info_.group = group_;
  rules.info_.tags = tags_;
  return rules;
}

std::vector<std::string> SchemaBase::names() const {
  std::vector<std::string> all;
  for (const Field& field : fields_) all.push_back(field.name);
  return all;
}

bool SchemaBase::read(const Value& value, void* out, const std::string& path, Faults& faults,
                      const Hint& hint) const {
  if (value.kind != Value::Kind::kMap && value.kind != Value::Kind::kNull) {
    if (path.empty()) {
      faults.add(value.mark,
                 fmt::format("expected lines of the form KEY: VALUE, got {}", value.str()));
    } else {
      detail::wrong_type(value, path, "a section", faults);
    }
    return false;
  }
  bool good = true;
  for (const Value::Member& member : value.members) {
    if (hint && member.key == "type") continue;
    const std::string key = detail::at(path, member.key);
    const auto field = std::ranges::find(fields_, member.key, &Field::name);
    if (field == fields_.end()) {
      const AdvisedKey* const known = advised_key(key);
      const std::string& written = member.value.scalar;
      if (known != nullptr && !written.empty() && written == known->former_default) continue;
      std::string tail = known != nullptr ? fmt::format("; {}", known->advice) : "";
      if (tail.empty() && hint && !faults.is_full()) tail = hint(member.key);
      if (tail.empty() && !faults.is_full()) {
        std::vector<FieldInfo> fields;
        info(path, fields);
        if (const auto near = nearest_key(key, fields))
          tail = fmt::format("; did you mean '{}'?", *near);
      }
      faults.add(member.mark, fmt::format("unknown key '{}'{}", shortened(key), tail));
      good = false;
    } else if (member.value.is_unresolved) {
      good = false;
    } else {
      void* const into = static_cast<std::byte*>(out) + field->offset;
      good &= field->type.read(member.value, into, key, faults) &&
              field->rules.check(field->type.write(into), member.value.mark, key, faults);
    }
  }
  for (const Field& field : fields_) {
    if (field.rules.info_.required && value.find(field.name) == nullptr) {
      faults.add(value.mark, fmt::format("the key '{}' is missing", detail::at(path, field.name)));
      good = false;
    }
  }
  if (!good) return false;
  for (const Check& check : checks_) {
    if (const auto problem = check(out)) {
      faults.add(mark_of(*problem, value), path.empty() ? *problem : path + ": " + *problem);
      good = false;
    }
  }
  return good;
}

Value SchemaBase::write(const void* in) const {
  Value value = Value::of_map();
  for (const Field& field : fields_) {
    value.set(field.name, field.type.write(static_cast<const std::byte*>(in) + field.offset));
  }
  return value;
}

void SchemaBase::info(const std::string& path, std::vector<FieldInfo>& out) const {
  for (const Field& field : fields_) {
    const void* const by_default = static_cast<const std::byte*>(defaults()) + field.offset;
    const Rules& rules = field.rules;
    FieldInfo info = rules.info_;
    info.path = detail::at(path, field.name);
    if (field.type.info != nullptr) {
      field.type.info(by_default, info.path, info.help, out);
      continue;
    }
    info.type = field.type.name();
    info.range = rules.bounds();
    if (rules.length_) info.range = fmt::format("{} values, each {}", *rules.length_, info.range);
    const Value value = field.type.write(by_default);
    if (value.kind == Value::Kind::kNull) info.default_value = "null";
    if (value.kind == Value::Kind::kScalar) info.default_value = value.scalar;
    if (value.kind == Value::Kind::kList) {
      std::vector<std::string> items;
      for (const Value& item : value.list) items.push_back(item.scalar);
      info.default_value = fmt::format("[{}]", base::join(items, ", "));
    }
    if (rules.shown_default_) info.default_value = *rules.shown_default_;
    out.push_back(std::move(info));
  }
}

Value SchemaBase::json_schema(Definitions& definitions) const {
  Value properties = Value::of_map();
  for (const Field& field : fields_) {
    Value schema = field.type.json_schema(definitions);
    field.rules.restrict(schema);
    Value property = Value::of_map();
    const FieldInfo& info = field.rules.info_;
    if (!info.help.empty()) {
      property.set(
          "description",
          Value::of_text(info.unit.empty() ? info.help : info.help + " (" + info.unit + ")"));
    }
    property.set("anyOf", *detail::or_reference(std::move(schema)).find("anyOf"));
    const Value by_default =
        field.type.write(static_cast<const std::byte*>(defaults()) + field.offset);
    const bool is_plain = by_default.kind == Value::Kind::kScalar;
    if (is_plain && !info.required) property.set("default", by_default);
    properties.set(field.name, std::move(property));
  }
  // A file may have a section without keys, which YAML reads as null.
  Value section =
      detail::map_of("type", detail::list_of({Value::of_text("object"), Value::of_text("null")}));
  section.set("additionalProperties", Value::of_scalar("false"));
  section.set("properties", std::move(properties));
  return section;
}

Value ComponentBase::json_schema(const RegistryBase& registry, const std::string& name,
                                 Definitions& definitions) {
  // The last word of a mangled name: "N6syncbn4data13TransformKindE".
  const size_t end = name.find_last_not_of('E') + 1;
  const size_t begin = name.find_last_of("0123456789", end - 1) + 1;
  const std::string key = name.substr(begin, end - begin);
  Value reference = detail::map_of("$ref", Value::of_text("#/$defs/" + key));
  if (!definitions.emplace(key, Value()).second) return reference;
  std::vector<Value> alternatives = {
      detail::map_of("enum", detail::list_of(texts_of(registry.names())))};
  for (const auto& [entry, names] : registry.groups()) {
    std::vector<Value> types = texts_of(names);
    Value section = entry->schema().json_schema(definitions);
    section.set("description", Value::of_text(entry->help));
    Value allowed = types.size() == 1 ? detail::map_of("const", types.front())
                                      : detail::map_of("enum", detail::list_of(std::move(types)));
    section.find("properties")->set("type", detail::or_reference(std::move(allowed)));
    alternatives.push_back(std::move(section));
  }
  definitions[key] = detail::map_of("anyOf", detail::list_of(std::move(alternatives)));
  return reference;
}

std::vector<RegistryBase::Group> RegistryBase::groups() const {
  std::vector<Group> all;
  for (const auto& [name, entry] : entries_) {
    const auto same = std::ranges::find_if(all, [&entry = entry](const Group& group) {
      return &group.entry->schema() == &entry.schema() && group.entry->help == entry.help &&
             group.entry->origin == entry.origin;
    });
    if (same == all.end()) {
      all.push_back({&entry, {name}});
    } else {
      same->names.push_back(name);
    }
  }
  return all;
}

void RegistryBase::set_origin(const std::string& origin) {
  for (auto& [name, entry] : entries_) {
    if (!entry.origin) entry.origin = origin;
  }
}

void RegistryBase::add_entry(const std::string& type, Entry entry) {
  const auto [present, is_new] = entries_.emplace(type, std::move(entry));
  if (is_new) return;
  const std::optional<std::string>& origin = present->second.origin;
  const std::string by =
      !origin ? "" : fmt::format(", by {}", origin->empty() ? "this program" : *origin);
  throw base::UserError(
      fmt::format("the {} '{}' is registered already{}; choose another name", noun_, type, by));
}

std::vector<std::string> RegistryBase::names() const {
  std::vector<std::string> all;
  for (const auto& [name, entry] : entries_) all.push_back(name);
  return all;
}

ComponentBase::ComponentBase(const RegistryBase& registry, const std::string& type) {
  Faults faults;
  read(registry, Value::of_scalar(type), "", faults);
  faults.throw_if_any();
}

Value ComponentBase::write() const {
  if (!options_) return {};
  Value value = Value::of_map();
  value.set("type", Value::of_scalar(type_));
  for (Value::Member& member : schema_->write(options_.get()).members) {
    value.set(member.key, std::move(member.value));
  }
  return value;
}

bool ComponentBase::read(const RegistryBase& registry, const Value& value, const std::string& path,
                         Faults& faults) {
  const std::vector<std::string> names = registry.names();
  const Value* type = value.kind == Value::Kind::kScalar ? &value : value.find("type");
  // A component with a default type does not need the key `type`.
  const Value default_type = Value::of_scalar(type_);
  if (type == nullptr && *this) type = &default_type;
  if (value.is_unresolved || (type != nullptr && type->is_unresolved)) return false;
  if (value.kind == Value::Kind::kList) {
    detail::wrong_type(value, path, "a section", faults);
    return false;
  }
  if (type != nullptr && type->kind != Value::Kind::kScalar) {
    detail::wrong_type(*type, detail::at(path, "type"), "a name", faults);
    return false;
  }
  if (type == nullptr) {
    faults.add(value.mark, fmt::format("the key '{}' is missing; it is one of {}",
                                       detail::at(path, "type"), base::join(names, ", ")));
    return false;
  }
  const auto entry = registry.entries().find(type->scalar);
  if (entry == registry.entries().end()) {
    const std::string near = base::did_you_mean(type->scalar, names);
    const std::string known =
        fmt::format(" (known: {}; `plugins` adds types of one's own)", base::join(names, ", "));
    faults.add(type->mark, fmt::format("{}: unknown type {}{}",
                                       type == &value ? path : detail::at(path, "type"),
                                       type->str(), near.empty() ? known : near));
    return false;
  }
  const Hint hint = [&](const std::string& key) -> std::string {
    std::vector<std::string> owners;
    for (const auto& [name, other] : registry.entries()) {
      if (std::ranges::count(other.schema().names(), key) > 0) owners.push_back(name);
    }
    if (owners.empty()) return "";
    return fmt::format("; it belongs to type {}, the type here is {}", base::join(owners, ", "),
                       type->scalar);
  };
  Value nothing;
  nothing.mark = value.mark;
  const SchemaBase& schema = entry->second.schema();
  const std::shared_ptr<void> options = entry->second.make_options();
  const Value& section = type == &value ? nothing : value;
  if (!schema.read(section, options.get(), path, faults, hint)) return false;
  type_ = entry->first;
  schema_ = &schema;
  options_ = options;
  return true;
}

void ComponentBase::info(const RegistryBase& registry, const std::string& path,
                         const std::string& help, std::vector<FieldInfo>& out) const {
  FieldInfo field;
  field.path = detail::at(path, "type");
  field.type = "text";
  field.range = "one of " + base::join(registry.names(), ", ");
  field.default_value = type_;
  field.required = !*this;
  field.help = help;
  for (const auto& [name, entry] : registry.entries()) {
    field.alternatives.emplace_back(name, entry.help);
  }
  out.push_back(std::move(field));
  for (const auto& [name, entry] : registry.entries()) {
    std::vector<FieldInfo> own;
    entry.schema().info(path, own);
    for (FieldInfo& one : own) {
      const bool is_direct = one.path.rfind('.') == path.size();
      if (is_direct) one.only_for = "type: " + name;
      // Several alternatives may contain the same section.
      const bool is_repeated = !is_direct && std::ranges::any_of(out, [&](const FieldInfo& other) {
        return other.path == one.path && other.only_for == one.only_for;
      });
      if (!is_repeated) out.push_back(std::move(one));
    }
  }
}

const void* ComponentBase::options() const {
  if (!options_) throw base::InternalError("a component was used that no configuration has set");
  return options_.get();
}

}  // namespace syncbn::config
