#include <syncbn/config/layers.h>

#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/config/codec.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

namespace syncbn::config {
namespace {

namespace fs = std::filesystem;

constexpr const char* kBase = "base";
constexpr std::string_view kOpening = "${";  // of a reference
// Upper bounds on what short files can expand to. Files that each name the next one twice double
// the number of files to read; references to sections of references multiply the values.
constexpr int kMaxFiles = 100;
constexpr int kMaxReferredValues = 100'000;
constexpr size_t kMaxTextBytes = 1 << 16;  // of one text

/// Replaces a leading `~/` by the home folder.
std::string in_home(std::string text) {
  if (text.starts_with("~/")) text.replace(0, 1, base::env("HOME").value_or("~"));
  return text;
}

/// `optimizer: sgd` is short for `optimizer: {type: sgd}`.
Value section_of_type(const Value& type) {
  Value section = Value::of_map();
  section.mark = type.mark;
  section.set("type", type);
  return section;
}

bool has_only_indices(const Value& section) {
  return std::ranges::all_of(section.members, [](const Value::Member& member) {
    return base::parse_number<size_t>(member.key).has_value();
  });
}

class Merger {
 public:
  explicit Merger(Faults& faults) : faults_(faults) {}

  void merge(const Value& over, Value& under, const std::string& path) {
    if (over.kind == Value::Kind::kScalar && under.find("type") != nullptr) {
      return merge(section_of_type(over), under, path);
    }
    if (over.kind != Value::Kind::kMap || under.kind == Value::Kind::kNull) {
      // Faults about missing keys name the file, even if it has no keys.
      const bool is_empty_file = path.empty() && over.kind == Value::Kind::kMap;
      const Mark place = is_empty_file && under.mark.source ? under.mark : over.mark;
      under = over;
      under.mark = place;
      return;
    }
    if (under.kind == Value::Kind::kList) return merge_items(over, under, path);
    // The top level has no type: reading it reports the scalar.
    if (under.kind == Value::Kind::kScalar && path.empty()) return;
    if (under.kind == Value::Kind::kScalar) {
      under = section_of_type(under);
      under.mark = over.mark;
    }
    merge_sections(over, under, path);
  }

 private:
  void merge_sections(const Value& over, Value& under, const std::string& path) {
    const Value* const type = over.find("type");
    const Value* const former = under.find("type");
    if (type != nullptr && former != nullptr && type->scalar != former->scalar) {
      under.members.clear();
      under.mark = type->mark;  // where keys that the new type needs are missing
    }
    for (const Value::Member& member : over.members) {
      Value* const present = under.find(member.key);
      if (present == nullptr) {
        under.members.push_back(member);
      } else {
        merge(member.value, *present, detail::at(path, member.key));
      }
    }
  }

  void merge_items(const Value& over, Value& under, const std::string& path) {
    // Keys that are not indices are meant for a section: reading the list reports them.
    if (!has_only_indices(over)) return;
    for (const Value::Member& member : over.members) {
      const size_t index = *base::parse_number<size_t>(member.key);
      if (index >= under.list.size()) {
        faults_.add(member.mark, fmt::format("{}: the list has {}, and the first is item 0",
                                             detail::at(path, member.key),
                                             base::counted(std::ssize(under.list), "item")));
      } else {
        merge(member.value, under.list[index], detail::at(path, member.key));
      }
    }
  }

  Faults& faults_;
};

class FileLoader {
 public:
  using Load = std::function<Value(const fs::path&)>;

  FileLoader(Faults& faults, const Load& load) : faults_(faults), load_(load) {}

  void load_over(const fs::path& file, Value& config) {
    chain_.push_back(file);
    Value own = load_(file);
    if (Value* const bases = own.kind == Value::Kind::kMap ? own.find(kBase) : nullptr) {
      const bool is_list = bases->kind == Value::Kind::kList;
      for (const Value& base : is_list ? bases->list : std::vector{*bases}) load_base(base, config);
      std::erase_if(own.members, [](const Value::Member& member) { return member.key == kBase; });
    }
    chain_.pop_back();
    config::merge(own, config, faults_);
    config.mark = own.mark;
  }

 private:
  void load_base(const Value& base, Value& config) {
    const auto fail = [&](const std::string& what) {
      throw base::UserError(fmt::format("{}: base: {}{}", base.mark.str(), what, chain()));
    };
    if (base.kind != Value::Kind::kScalar || base.scalar.empty()) {
      fail("expected a file or a list of files, got " + base.str());
    }
    if (base.scalar.find(kOpening) != std::string::npos) {
      fail(
          fmt::format("{} has a reference, which base cannot have; write the path of a file, "
                      "relative to this one",
                      base.str()));
    }
    const fs::path file = chain_.back().parent_path() / in_home(base.scalar);
    std::error_code error;
    const auto is_file = [&](const fs::path& other) { return fs::equivalent(file, other, error); };
    if (std::ranges::any_of(chain_, is_file)) fail(file.string() + " is based on itself");
    if (++files_ > kMaxFiles) fail(fmt::format("more than {} files", kMaxFiles));
    const fs::file_status status = fs::status(file, error);
    if (status.type() == fs::file_type::not_found) {
      fail(fmt::format("there is no file {}", file.string()));
    }
    if (!fs::status_known(status)) fail(fmt::format("{}: {}", file.string(), error.message()));
    if (fs::is_directory(status)) fail(fmt::format("{} is a folder", file.string()));
    load_over(file, config);
  }

  /// For messages: the files that led to this one, unless the command line names it.
  std::string chain() const {
    if (chain_.size() < 2) return "";
    std::vector<std::string> files;
    for (const fs::path& file : chain_) files.push_back(file.string());
    return fmt::format(" ({})", base::join(files, ", based on "));
  }

  Faults& faults_;
  const Load& load_;
  std::vector<fs::path> chain_;
  int files_ = 0;
};

constexpr std::string_view kEnvironment = "env:";

struct Reference {
  std::string name;
  std::optional<std::string> otherwise;
};

/// @param inner the text between the brackets
Reference parse_reference(std::string_view inner) {
  const size_t otherwise = inner.find(":-");
  Reference reference{std::string(inner.substr(0, otherwise)), std::nullopt};
  if (otherwise != inner.npos) reference.otherwise = inner.substr(otherwise + 2);
  return reference;
}

class Resolver {
 public:
  Resolver(Value& root, const std::vector<FieldInfo>& fields, Faults& faults)
      : root_(root), fields_(fields), faults_(faults) {}

  void resolve(Value& value, const std::string& path) {
    if (!resolved_.insert(&value).second) return;
    chain_.push_back({&value, path});
    if (value.kind == Value::Kind::kScalar) {
      resolve_text(value);
    } else {
      for (size_t i = 0; i < value.list.size(); ++i) {
        resolve(value.list[i], detail::at(path, std::to_string(i)));
      }
      for (Value::Member& member : value.members)
        resolve(member.value, detail::at(path, member.key));
    }
    chain_.pop_back();
  }

 private:
  struct Step {
    const Value* value;
    std::string path;
  };

  void resolve_text(Value& value) {
    const std::string text = value.scalar;
    std::string out;
    size_t at = 0;
    for (size_t begin = 0; (begin = text.find(kOpening, at)) != text.npos;) {
      out.append(text, at, begin - at);
      const size_t inner = begin + kOpening.size();
      if (begin > at && text[begin - 1] == '$') {
        out.replace(out.size() - 1, 1, kOpening);
        at = inner;
        continue;
      }
      const size_t end = text.find('}', inner);
      if (end == text.npos) return fail(value, "'${' is not closed; for this text, write $${");
      at = end + 1;
      Value found;
      const std::string written = text.substr(inner, end - inner);
      const Reference reference = parse_reference(written);
      if (written.find(kOpening) != std::string::npos) {
        return fail(value, fmt::format("${{{}}} has a reference within a reference, which is not "
                                       "possible",
                                       written));
      }
      if (reference.name.empty() || reference.name == kEnvironment) {
        return fail(value, fmt::format("${{{}}} has no name; write ${{KEY}} or ${{env:VARIABLE}}",
                                       written));
      }
      if (!look_up(reference, value, found)) return;
      if (found.is_unresolved) {
        value.is_unresolved = true;
        return;
      }
      if (begin == 0 && at == text.size()) return replace(value, std::move(found));
      if (found.kind != Value::Kind::kScalar) {
        return fail(value, fmt::format("${{{}}} is {}, which cannot be part of a text",
                                       reference.name, found.str()));
      }
      out += found.scalar;
      if (out.size() > kMaxTextBytes) return fail(value, "its references make it too long");
    }
    value.scalar = in_home(out.append(text, at));
  }

  void replace(Value& value, Value&& by) {
    for_each_value(by, [this](const Value&) { ++values_; });
    if (values_ > kMaxReferredValues) return fail(value, "its references make it too large");
    const Mark mark = value.mark;
    value = std::move(by);
    value.mark = mark;
    for_each_value(value, [this](const Value& one) { resolved_.insert(&one); });
  }

  /// Sets `found` to the value that a reference in `value` refers to. Returns false after a fault.
  bool look_up(const Reference& reference, Value& value, Value& found) {
    const Mark mark = value.mark;
    const std::string& name = reference.name;
    std::string missing;
    if (name == "here") {
      const fs::path file = mark.line > 0 ? fs::path(*mark.source) : fs::path("x");
      found = Value::of_scalar(fs::absolute(file).lexically_normal().parent_path().string());
      return true;
    }
    if (name.starts_with(kEnvironment)) {
      const std::string variable = name.substr(kEnvironment.size());
      if (const auto text = base::env(variable.c_str())) {
        found = Value::of_scalar(*text);
        return true;
      }
      missing = ::getenv(variable.c_str()) == nullptr
                    ? fmt::format("the environment variable {} is not set", variable)
                    : fmt::format("the environment variable {} is empty", variable);
    } else {
      Value* const other = find(name);
      const auto cycle = std::ranges::find(chain_, other, &Step::value);
      if (other != nullptr && cycle != chain_.end()) {
        fail(value, fmt::format("{} refers to itself{}", cycle->path, via(cycle)));
        return false;
      }
      if (other != nullptr) {
        resolve(*other, name);
        found = *other;
        return true;
      }
      if (find_default(name, found)) return true;
      missing = fmt::format("the key '{}' is not set", name);
      const auto key = nearest_key(name, fields_);
      if (key && *key != name) missing += fmt::format(" (is it '{}'?)", *key);
    }
    if (!reference.otherwise) {
      fail(value, fmt::format("${{{0}}}: {1}; set it, or write a default: ${{{0}:-DEFAULT}}", name,
                              missing));
      return false;
    }
    found = Value::of_scalar(*reference.otherwise);
    return true;
  }

  Value* find(const std::string& path) {
    Value* value = &root_;
    for (size_t begin = 0; begin <= path.size();) {
      if (value->kind == Value::Kind::kScalar) resolve(*value, path.substr(0, begin - 1));
      const size_t end = std::min(path.find('.', begin), path.size());
      const std::string key = path.substr(begin, end - begin);
      begin = end + 1;
      const auto index = base::parse_number<size_t>(key);
      if (value->kind == Value::Kind::kList && index && *index < value->list.size()) {
        value = &value->list[*index];
      } else if (value->kind != Value::Kind::kScalar || key != "type") {
        value = value->find(key);
      }
      if (value == nullptr) return nullptr;
    }
    return value;
  }

  /// The name of the alternative that a section chooses, or "".
  std::string chosen_type(const std::string& section) {
    const std::string path = section + ".type";
    if (Value* const given = find(path); given != nullptr) {
      resolve(*given, path);
      return given->scalar;
    }
    Value by_default;
    return find_default(path, by_default) ? by_default.scalar : "";
  }

  bool find_default(const std::string& path, Value& found) {
    const auto field = std::ranges::find_if(fields_, [&](const FieldInfo& one) {
      // The defaults of an alternative count only if the section chooses it.
      return one.path == path &&
             (one.only_for.empty() ||
              one.only_for == "type: " + chosen_type(path.substr(0, path.rfind('.'))));
    });
    if (field == fields_.end() || field->required) return false;
    const bool is_text = field->is_text() && field->default_value != "null";
    found = is_text ? Value::of_text(field->default_value) : parse_yaml(field->default_value, path);
    return true;
  }

  std::string via(std::vector<Step>::const_iterator cycle) const {
    std::vector<std::string> paths;
    for (auto step = cycle + 1; step != chain_.end(); ++step) paths.push_back(step->path);
    return paths.empty() ? "" : " through " + base::join(paths, ", ");
  }

  void fail(Value& value, const std::string& message) {
    value.is_unresolved = true;
    faults_.add(value.mark, chain_.back().path + ": " + message);
  }

  Value& root_;
  const std::vector<FieldInfo>& fields_;
  Faults& faults_;
  std::set<const Value*> resolved_;
  std::vector<Step> chain_;
  int values_ = 0;
};

}  // namespace

void merge(const Value& over, Value& under, Faults& faults) {
  const bool is_empty = over.kind == Value::Kind::kNull;
  if (!is_empty || under.kind == Value::Kind::kNull) Merger(faults).merge(over, under, "");
}

Value load_files(const std::vector<fs::path>& files, Faults& faults,
                 const std::function<Value(const fs::path&)>& load) {
  Value config;
  FileLoader loader(faults, load);
  for (const fs::path& file : files) loader.load_over(file, config);
  return config;
}

void resolve_references(Value& config, const std::vector<FieldInfo>& fields, Faults& faults) {
  Resolver(config, fields, faults).resolve(config, "");
}

void escape_references(Value& config) {
  for_each_value(config, [](Value& value) {
    std::string& text = value.scalar;
    for (size_t at = 0; (at = text.find(kOpening, at)) != text.npos; at += kOpening.size() + 1) {
      text.insert(at, 1, '$');
    }
  });
}

}  // namespace syncbn::config
