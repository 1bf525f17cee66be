#pragma once

// Sections whose key `type` chooses an alternative. To register an alternative, include schema.h.

#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include <syncbn/config/codec.h>
#include <syncbn/config/field_info.h>
#include <syncbn/config/value.h>

namespace syncbn::config {

class SchemaBase;

/// The part of Registry without templates.
class RegistryBase {
 public:
  struct Entry {
    std::string help;
    const SchemaBase& (*schema)();
    std::shared_ptr<void> (*make_options)();  ///< options with their defaults
    /// The plug-in that registered the alternative, "libmine.so"; "" for the program itself.
    /// std::nullopt until set_origin().
    std::optional<std::string> origin = std::nullopt;
  };

  const std::map<std::string, Entry>& entries() const { return entries_; }
  std::vector<std::string> names() const;

  /// Alternatives with the same options, help and origin.
  struct Group {
    const Entry* entry;
    std::vector<std::string> names;
  };
  std::vector<Group> groups() const;

  /// Sets the origin of the alternatives that have none.
  void set_origin(const std::string& origin);

 protected:
  /// @param noun the word for an alternative in messages: "model"
  explicit RegistryBase(std::string noun) : noun_(std::move(noun)) {}

  /// @throws base::UserError if an alternative of this name exists.
  void add_entry(const std::string& type, Entry entry);

 private:
  std::string noun_;
  std::map<std::string, Entry> entries_;
};

/// Alternatives that a configuration chooses by name, each with its own options:
/// `optimizer: {type: sgd, lr: 0.1}`. An alternative makes a Product from its options and Args.
/// Not thread-safe: register alternatives at start-up.
template <class Product_, class... Args>
class Registry : public RegistryBase {
 public:
  using Product = Product_;

  /// @param adders each registers the alternatives of one file
  explicit Registry(std::string noun, std::initializer_list<void (*)(Registry&)> adders = {})
      : RegistryBase(std::move(noun)) {
    for (const auto add : adders) add(*this);
  }

  /// @param make called with const Options& and Args
  /// @throws base::UserError if an alternative of this name exists.
  template <Described Options, class Make>
  void add(const std::string& type, const std::string& help, Make make) {
    add_entry(type, {help, []() -> const SchemaBase& { return Schema<Options>::get(); },
                     [] { return std::shared_ptr<void>(std::make_shared<Options>()); }});
    makers_[type] = [make](const void* options, Args... args) -> Product {
      return make(*static_cast<const Options*>(options), std::forward<Args>(args)...);
    };
  }

  Product make(const std::string& type, const void* options, Args... args) const {
    return makers_.at(type)(options, std::forward<Args>(args)...);
  }

 private:
  std::map<std::string, std::function<Product(const void*, Args...)>> makers_;
};

/// The part of Component without templates.
class ComponentBase {
 public:
  const std::string& type() const { return type_; }
  explicit operator bool() const { return options_ != nullptr; }
  Value write() const;

 protected:
  ComponentBase() = default;
  ComponentBase(const RegistryBase& registry, const std::string& type);

  bool read(const RegistryBase& registry, const Value& value, const std::string& path,
            Faults& faults);
  void info(const RegistryBase& registry, const std::string& path, const std::string& help,
            std::vector<FieldInfo>& out) const;
  /// Adds the definition `name` if it is new, and returns a reference to it.
  static Value json_schema(const RegistryBase& registry, const std::string& name,
                           Definitions& definitions);
  /// @throws base::InternalError if no configuration has set this component.
  const void* options() const;

 private:
  std::string type_;
  const SchemaBase* schema_ = nullptr;
  std::shared_ptr<const void> options_;
};

/// A field that chooses from a registry. `Kind` has
///   using Registry = config::Registry<...>;   static Registry& registry();
/// Written as `{type: name, ...its options}` or just `name`.
template <class Kind>
class Component : public ComponentBase {
 public:
  Component() = default;
  /// The alternative `type` with its default options.
  explicit Component(const std::string& type) : ComponentBase(Kind::registry(), type) {}

  template <class... Args>
  auto make(Args&&... args) const {
    return Kind::registry().make(type(), options(), std::forward<Args>(args)...);
  }

 private:
  friend struct Codec<Component>;
};

template <class Kind>
struct Codec<Component<Kind>> {
  static std::string type_name() { return "section with a type"; }
  static bool read(const Value& value, Component<Kind>& out, const std::string& path,
                   Faults& faults) {
    return out.read(Kind::registry(), value, path, faults);
  }
  static Value write(const Component<Kind>& in) { return in.write(); }
  static void info(const Component<Kind>& defaults, const std::string& path,
                   const std::string& help, std::vector<FieldInfo>& out) {
    defaults.info(Kind::registry(), path, help, out);
  }
  static Value json_schema(Definitions& definitions) {
    return Component<Kind>::json_schema(Kind::registry(), typeid(Kind).name(), definitions);
  }
};

}  // namespace syncbn::config
