#include "weights/torch_file.h"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <map>
#include <string>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include "weights/little_endian.h"
#include "weights/zip_archive.h"

namespace syncbn::models::detail {
namespace {

using Kind = Value::Kind;

// The beginning of the format before torch 1.6: a pickle of 0x1950a86a20f9469cfc6c.
constexpr std::string_view kLegacy = "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";

[[noreturn]] void fail_truncated() {
  throw base::UserError("it is damaged; the file is probably truncated");
}

/// The parts of a persistent id: ("storage", type, key, device, elements).
struct StorageId {
  std::string key;
  at::ScalarType dtype = at::kFloat;
  size_t bytes = 0;
};

StorageId parse_id(const Value& id) {
  const auto& items = id.items;
  const bool is_storage = id.kind == Kind::kTuple && items.size() >= 5 &&
                          items[0]->text == "storage" && items[1]->kind == Kind::kGlobal &&
                          items[2]->is_text() && items[4]->kind == Kind::kInt;
  if (!is_storage) fail_truncated();
  if (items.size() > 5 && items[5]->kind != Kind::kNone) {
    throw base::UserError(
        "it has views of storages, which torch has not written since version 0.4");
  }
  StorageId found{.key = items[2]->text, .dtype = storage_type(items[1]->text)};
  int64_t bytes = 0;
  const auto element_size = static_cast<int64_t>(c10::elementSize(found.dtype));
  if (items[4]->integer < 0 || __builtin_mul_overflow(items[4]->integer, element_size, &bytes)) {
    fail_truncated();
  }
  found.bytes = static_cast<size_t>(bytes);
  return found;
}

/// Storages by key: several tensors may share one.
class Storages {
 public:
  explicit Storages(const MappedFile& file) : file_(file) {}

  /// @param find returns the content of the whole storage; called once for each storage
  template <class Find>
  Value make(const StorageId& id, const Find& find) {
    auto found = all_.find(id.key);
    if (found == all_.end()) {
      const std::string_view content = find(id.key);
      // Tensors of any type may lie in the bytes of torch.storage.UntypedStorage.
      const at::ScalarType largest = id.dtype == at::kByte ? at::kComplexDouble : id.dtype;
      const Value value = {.kind = Kind::kStorage,
                           .dtype = id.dtype,
                           .storage = file_.storage(content, c10::elementSize(largest))};
      found = all_.emplace(id.key, value).first;
    }
    if (found->second.storage.nbytes() < id.bytes) fail_truncated();
    if (found->second.dtype != id.dtype) {
      throw base::UserError(
          fmt::format("it is damaged: storage {} has two types", base::printable(id.key)));
    }
    return found->second;
  }

 private:
  const MappedFile& file_;
  std::map<std::string, Value> all_;
};

const Value& read_zip(const MappedFile& file, Values& values) {
  const ZipArchive archive(file.bytes());
  if (archive.has("constants.pkl")) {
    throw base::UserError(
        "it is a TorchScript program, not weights; in Python, torch.save(model.state_dict(), …)");
  }
  if (archive.has("byteorder") && archive.read("byteorder") != "little") {
    throw base::UserError("it was written on a big-endian machine");
  }
  Storages storages(file);
  Unpickler unpickler(archive.read("data.pkl"), values, [&](const Value& value) {
    return storages.make(parse_id(value),
                         [&](const std::string& key) { return archive.read("data/" + key); });
  });
  return unpickler.read();
}

/// The format is a sequence of pickles (a magic number, a version, the machine, the saved value and
/// the storages' keys), then each storage: its number of elements and its bytes.
const Value& read_legacy(const MappedFile& file, Values& values) {
  std::string_view rest = file.bytes();
  std::map<std::string, StorageId> ids;
  const auto next = [&](Values& owner, const Unpickler::LoadStorage& load) -> const Value& {
    Unpickler unpickler(rest, owner, load);
    const Value& value = unpickler.read();
    rest.remove_prefix(unpickler.size());
    return value;
  };
  const auto none = [](const Value&) -> Value { fail_truncated(); };
  for (int i = 0; i < 3; ++i) next(values, none);
  const std::string_view saved = rest;
  // The storages come after the saved value that refers to them: the first pass finds their sizes.
  Values discarded(file.bytes().size());
  next(discarded, [&](const Value& value) {
    const StorageId id = parse_id(value);
    ids[id.key] = id;
    return Value{.kind = Kind::kStorage,
                 .dtype = id.dtype,
                 .storage = {c10::Storage::use_byte_size_t(), id.bytes,
                             at::DataPtr(nullptr, at::Device(at::kCPU))}};
  });
  const Value& keys = next(values, none);
  std::map<std::string, std::string_view> contents;
  for (const Value* const key : keys.items) {
    const auto id = ids.find(key->text);
    if (id == ids.end() || rest.size() < sizeof(int64_t)) fail_truncated();
    const auto elements = read_le<int64_t>(rest, 0);
    const size_t bytes = id->second.bytes;
    const auto element_size = static_cast<int64_t>(c10::elementSize(id->second.dtype));
    if (elements != static_cast<int64_t>(bytes) / element_size) fail_truncated();
    rest.remove_prefix(sizeof(int64_t));
    if (rest.size() < bytes) fail_truncated();
    contents[key->text] = rest.substr(0, bytes);
    rest.remove_prefix(bytes);
  }
  Storages storages(file);
  Unpickler second(saved, values, [&](const Value& value) {
    return storages.make(parse_id(value), [&](const std::string& key) {
      const auto content = contents.find(key);
      if (content == contents.end()) fail_truncated();
      return content->second;
    });
  });
  return second.read();
}

}  // namespace

bool is_torch_file(std::string_view bytes) {
  return ZipArchive::begins(bytes) || bytes.starts_with(kLegacy);
}

const Value& read_torch_file(const MappedFile& file, Values& values) {
  return ZipArchive::begins(file.bytes()) ? read_zip(file, values) : read_legacy(file, values);
}

}  // namespace syncbn::models::detail
