#pragma once

// Sections that choose between alternatives by their key `type`. Included by schema.h, which is
// needed where an alternative is registered.

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/config/codec.h>
#include <syncbn/config/field_info.h>
#include <syncbn/config/value.h>

namespace syncbn::config {

/// Alternatives that a configuration chooses from by name, each with options of its own:
/// `optimizer: {type: sgd, lr: 0.1}`. Product is what an alternative makes, Args what it needs
/// besides its options. Registration happens at start-up, before threads.
template <class Product_, class... Args>
class Registry {
 public:
  using Product = Product_;

  /// One alternative with its options read.
  class Choice {
   public:
    virtual ~Choice() = default;
    virtual Product make(Args... args) const = 0;
    virtual Value write() const = 0;
  };

  struct Entry {
    std::string help;
    std::function<std::shared_ptr<const Choice>(const Value&, const std::string&, Faults&,
                                                const Hint&)>
        read;
    std::function<void(const std::string&, std::vector<FieldInfo>&)> info;
    std::function<std::vector<std::string>()> keys;
  };

  template <Described Options, class Make>
  void add(const std::string& type, const std::string& help, Make make) {
    Entry entry;
    entry.help = help;
    entry.read = [type, make](const Value& value, const std::string& path, Faults& faults,
                              const Hint& hint) -> std::shared_ptr<const Choice> {
      Options options{};
      if (!Schema<Options>::get().read(value, options, path, faults, "type", hint)) return nullptr;
      return std::make_shared<Made<Options, Make>>(type, std::move(options), make);
    };
    entry.info = [type](const std::string& path, std::vector<FieldInfo>& out) {
      const size_t first = out.size();
      Schema<Options>::get().info(path, out);
      for (size_t i = first; i < out.size(); ++i) out[i].only_for = "type: " + type;
    };
    entry.keys = [] { return Schema<Options>::get().names(); };
    entries_[type] = std::move(entry);
  }

  const std::map<std::string, Entry>& entries() const { return entries_; }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& [name, entry] : entries_) all.push_back(name);
    return all;
  }

  /// A hint (see Hint) about a key that is known, but to another alternative.
  std::string belongs_to(const std::string& key) const {
    std::vector<std::string> types;
    for (const auto& [type, entry] : entries_) {
      const auto keys = entry.keys();
      if (std::find(keys.begin(), keys.end(), key) != keys.end()) types.push_back(type);
    }
    return types.empty() ? "" : "; it belongs to type " + base::join(types, ", ");
  }

 private:
  template <class Options, class Make>
  class Made : public Choice {
   public:
    Made(std::string type, Options options, Make make)
        : type_(std::move(type)), options_(std::move(options)), make_(std::move(make)) {}
    Product make(Args... args) const override {
      return make_(options_, std::forward<Args>(args)...);
    }
    Value write() const override {
      Value value = Value::of_map();
      value.set("type", Value::of_scalar(type_));
      for (auto& member : Schema<Options>::get().write(options_).members) {
        value.set(member.key, std::move(member.value));
      }
      return value;
    }

   private:
    std::string type_;
    Options options_;
    Make make_;
  };

  std::map<std::string, Entry> entries_;
};

/// A field that chooses from a registry. `Kind` has
///   using Registry = config::Registry<...>;   static Registry& registry();
/// Written as `{type: name, ...its options}` or just `name`.
template <class Kind>
class Component {
 public:
  using Choice = typename Kind::Registry::Choice;

  Component() = default;
  /// The alternative `type` with its default options.
  explicit Component(const std::string& type) : type_(type) {
    Value value = Value::of_map();
    Faults faults;
    choice_ = Kind::registry().entries().at(type).read(value, "", faults, {});
    faults.throw_if_any();
  }
  Component(std::string type, std::shared_ptr<const Choice> choice)
      : type_(std::move(type)), choice_(std::move(choice)) {}

  const std::string& type() const { return type_; }
  explicit operator bool() const { return choice_ != nullptr; }

  template <class... Args>
  auto make(Args&&... args) const {
    if (!choice_) throw base::InternalError("a component was used that no configuration has set");
    return choice_->make(std::forward<Args>(args)...);
  }
  Value write() const { return choice_ ? choice_->write() : Value(); }

 private:
  std::string type_;
  std::shared_ptr<const Choice> choice_;
};

template <class Kind>
struct Codec<Component<Kind>> {
  static std::string type_name() { return "section with a type"; }
  static bool read(const Value& value, Component<Kind>& out, const std::string& path,
                   Faults& faults) {
    const auto& entries = Kind::registry().entries();
    const Value* type = value.kind == Value::Kind::kScalar ? &value : value.find("type");
    // A default names its type, so that its options can be set without repeating it.
    const Value default_type = Value::of_scalar(out.type());
    if (type == nullptr && out) type = &default_type;
    if (value.kind == Value::Kind::kList || type == nullptr || type->kind != Value::Kind::kScalar) {
      faults.add(value.mark, fmt::format("{}: the key 'type' is missing; it is one of {}", path,
                                         base::join(Kind::registry().names(), ", ")));
      return false;
    }
    const auto entry = entries.find(type->scalar);
    if (entry == entries.end()) {
      const auto names = Kind::registry().names();
      faults.add(type->mark,
                 fmt::format("{}: unknown type {}{} (known: {})", path, type->str(),
                             base::did_you_mean(type->scalar, names), base::join(names, ", ")));
      return false;
    }
    Value nothing;
    nothing.mark = value.mark;
    const Hint hint = [&](const std::string& key) {
      const std::string owner = Kind::registry().belongs_to(key);
      return owner.empty() ? owner : fmt::format("{}, the type here is {}", owner, entry->first);
    };
    auto choice = entry->second.read(type == &value ? nothing : value, path, faults, hint);
    if (!choice) return false;
    out = Component<Kind>(entry->first, std::move(choice));
    return true;
  }
  static Value write(const Component<Kind>& in) { return in.write(); }
  static void info(const Component<Kind>& defaults, const std::string& path,
                   const std::string& help, std::vector<FieldInfo>& out) {
    FieldInfo type;
    type.path = detail::at(path, "type");
    type.type = "text";
    type.range = "one of " + base::join(Kind::registry().names(), ", ");
    type.default_value = defaults.type();
    type.required = !defaults;
    type.help = help;
    for (const auto& [name, entry] : Kind::registry().entries()) {
      type.alternatives.emplace_back(name, entry.help);
    }
    out.push_back(std::move(type));
    for (const auto& [name, entry] : Kind::registry().entries()) entry.info(path, out);
  }
};

}  // namespace syncbn::config
