#include <syncbn/config/schema.h>

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>

namespace syncbn::config {

SchemaBase::SchemaBase(std::shared_ptr<const void> defaults) : defaults_(std::move(defaults)) {}

SchemaBase::~SchemaBase() = default;

Rules& SchemaBase::add_field(const std::string& name, const std::string& help,
                             detail::FieldType type, const void* member) {
  const ptrdiff_t offset =
      static_cast<const std::byte*>(member) - static_cast<const std::byte*>(defaults());
  return fields_.emplace_back(Field{name, help, type, offset, {}}).rules;
}

void SchemaBase::add_check(Check check) {
  checks_.push_back(std::move(check));
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
    const auto field = std::find_if(fields_.begin(), fields_.end(),
                                    [&](const Field& f) { return f.name == member.key; });
    if (field == fields_.end()) {
      std::string tail = hint ? hint(member.key) : "";
      if (tail.empty()) tail = base::did_you_mean(member.key, names());
      faults.add(member.mark, fmt::format("unknown key '{}'{}", shortened(key), tail));
      good = false;
    } else {
      void* const into = static_cast<std::byte*>(out) + field->offset;
      good &= field->type.read(member.value, into, key, faults) &&
              field->rules.check(field->type.write(into), member.value.mark, key, faults);
    }
  }
  for (const Field& field : fields_) {
    if (field.rules.required_ && value.find(field.name) == nullptr) {
      faults.add(value.mark, fmt::format("the key '{}' is missing", detail::at(path, field.name)));
      good = false;
    }
  }
  if (!good) return false;
  for (const Check& check : checks_) {
    if (const auto problem = check(out)) {
      faults.add(value.mark, path.empty() ? *problem : path + ": " + *problem);
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
    const std::string key = detail::at(path, field.name);
    if (field.type.info != nullptr) {
      field.type.info(by_default, key, field.help, out);
      continue;
    }
    FieldInfo info;
    info.path = key;
    info.type = field.type.name();
    info.help = field.help;
    info.unit = field.rules.unit_;
    info.range = field.rules.range();
    info.required = field.rules.required_;
    const Value value = field.type.write(by_default);
    if (value.kind == Value::Kind::kNull) info.default_value = "null";
    if (value.kind == Value::Kind::kScalar) info.default_value = value.scalar;
    if (value.kind == Value::Kind::kList) {
      std::vector<std::string> items;
      for (const Value& item : value.list) items.push_back(item.scalar);
      info.default_value = fmt::format("[{}]", base::join(items, ", "));
    }
    out.push_back(std::move(info));
  }
}

}  // namespace syncbn::config
