#include <syncbn/config/component.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/config/schema.h>

#include <algorithm>

namespace syncbn::config {

const RegistryBase::Entry* RegistryBase::find(const std::string& type) const {
  const auto entry = entries_.find(type);
  return entry == entries_.end() ? nullptr : &entry->second;
}

std::vector<std::string> RegistryBase::names() const {
  std::vector<std::string> all;
  for (const auto& [name, entry] : entries_) all.push_back(name);
  return all;
}

std::string RegistryBase::belongs_to(const std::string& key) const {
  std::vector<std::string> types;
  for (const auto& [type, entry] : entries_) {
    const auto keys = entry.schema().names();
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) types.push_back(type);
  }
  return types.empty() ? "" : "; it belongs to type " + base::join(types, ", ");
}

void RegistryBase::info(const std::string& path, std::vector<FieldInfo>& out) const {
  for (const auto& [type, entry] : entries_) {
    const size_t first = out.size();
    entry.schema().info(path, out);
    for (size_t i = first; i < out.size(); ++i) out[i].only_for = "type: " + type;
  }
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
  // A default names its type, so that its options can be set without repeating it.
  const Value default_type = Value::of_scalar(type_);
  if (type == nullptr && *this) type = &default_type;
  if (value.kind == Value::Kind::kList || type == nullptr || type->kind != Value::Kind::kScalar) {
    faults.add(value.mark, fmt::format("{}: the key 'type' is missing; it is one of {}", path,
                                       base::join(names, ", ")));
    return false;
  }
  const RegistryBase::Entry* entry = registry.find(type->scalar);
  if (entry == nullptr) {
    faults.add(type->mark,
               fmt::format("{}: unknown type {}{} (known: {})", path, type->str(),
                           base::did_you_mean(type->scalar, names), base::join(names, ", ")));
    return false;
  }
  Value nothing;
  nothing.mark = value.mark;
  const Hint hint = [&](const std::string& key) {
    const std::string owner = registry.belongs_to(key);
    return owner.empty() ? owner : fmt::format("{}, the type here is {}", owner, type->scalar);
  };
  const std::shared_ptr<void> options = entry->make_options();
  if (!entry->schema().read(type == &value ? nothing : value, options.get(), path, faults, hint)) {
    return false;
  }
  type_ = std::string(type->scalar);
  schema_ = &entry->schema();
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
  for (const std::string& name : registry.names()) {
    field.alternatives.emplace_back(name, registry.find(name)->help);
  }
  out.push_back(std::move(field));
  registry.info(path, out);
}

const void* ComponentBase::options() const {
  if (!options_) throw base::InternalError("a component was used that no configuration has set");
  return options_.get();
}

}  // namespace syncbn::config
