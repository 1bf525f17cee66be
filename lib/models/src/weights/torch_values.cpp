#include <ATen/core/jit_type.h>
#include <fmt/format.h>

#include <string_view>
#include <unordered_map>

#include <syncbn/base/error.h>
#include <syncbn/models/torch_archive.h>

#include "weights/mapped_file.h"
#include "weights/pickle.h"
#include "weights/torch_file.h"

namespace syncbn::models {
namespace {

using detail::Value;

/// Converts Values to IValues. A container that occurs several times becomes one IValue.
class Converter {
 public:
  c10::IValue convert(const Value& value, int depth = 0) {
    // A container may contain itself.
    constexpr int kMaxDepth = 100;
    if (depth > kMaxDepth) throw base::UserError("its values are nested too deeply");
    const auto found = made_.find(&value);
    if (found != made_.end()) return found->second;
    return made_[&value] = make(value, depth);
  }

 private:
  c10::IValue make(const Value& value, int depth) {
    switch (value.kind) {
      case Value::Kind::kBool:
        return value.integer != 0;
      case Value::Kind::kInt:
        return value.integer;
      case Value::Kind::kFloat:
        return value.number;
      case Value::Kind::kText:
      case Value::Kind::kBytes:
      case Value::Kind::kGlobal:
        return value.text;
      case Value::Kind::kTuple:
      case Value::Kind::kList:
        return list_of(value, depth);
      case Value::Kind::kDict:
        return dict_of(value, depth);
      case Value::Kind::kTensor:
        return value.tensor;
      case Value::Kind::kObject:
        return c10::ivalue::Tuple::create({c10::IValue(value.text)});
      case Value::Kind::kNone:
      case Value::Kind::kStorage:
        break;
    }
    return {};
  }

  c10::IValue list_of(const Value& value, int depth) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const Value* const item : value.items) list.push_back(convert(*item, depth + 1));
    return list;
  }

  c10::IValue dict_of(const Value& value, int depth) {
    Dict dict(c10::AnyType::get(), c10::AnyType::get());
    for (size_t i = 0; i + 1 < value.items.size(); i += 2) {
      const Value& key = *value.items[i];
      if (!key.is_text() && key.kind != Value::Kind::kInt) continue;
      dict.insert_or_assign(convert(key, depth + 1), convert(*value.items[i + 1], depth + 1));
    }
    return dict;
  }

  std::unordered_map<const Value*, c10::IValue> made_;
};

c10::IValue values_of(const detail::MappedFile& file) {
  if (!detail::is_torch_file(file.bytes())) {
    throw base::UserError("it is not a file of torch.save");
  }
  detail::Values values(file.bytes().size());
  return Converter().convert(detail::read_torch_file(file, values));
}

}  // namespace

c10::IValue parse_torch_values(std::string_view bytes) {
  return values_of(*detail::MappedFile::copy_of(bytes));
}

c10::IValue read_torch_values(const std::filesystem::path& path) {
  const auto file = detail::MappedFile::open(path);
  try {
    return values_of(*file);
  } catch (const base::UserError& error) {
    throw base::UserError(fmt::format("cannot read {}: {}", path.string(), error.what()));
  }
}

}  // namespace syncbn::models
