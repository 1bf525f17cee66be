#include "weights/safetensors.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include "weights/little_endian.h"

namespace syncbn::models::detail {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMaxHeader = uint64_t{4} << 20;  // bytes; a large model's is below 1 MiB
constexpr size_t kMaxSizes = 64;
constexpr size_t kMaxEntryValues = 100;  // of JSON: type, sizes and offsets
constexpr int kMaxDepth = 3;             // of JSON: header, entry, sizes
constexpr size_t kAlignment = 8;
constexpr const char* kMetadata = "__metadata__";

constexpr std::pair<std::string_view, at::ScalarType> kTypes[] = {
    {"F64", at::kDouble},          {"F32", at::kFloat},        {"F16", at::kHalf},
    {"BF16", at::kBFloat16},       {"I64", at::kLong},         {"I32", at::kInt},
    {"I16", at::kShort},           {"I8", at::kChar},          {"U64", at::kUInt64},
    {"U32", at::kUInt32},          {"U16", at::kUInt16},       {"U8", at::kByte},
    {"BOOL", at::kBool},           {"C64", at::kComplexFloat}, {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
};

[[noreturn]] void refuse(const std::string& why) {
  throw base::UserError(why);
}

struct Entry {
  std::string name;
  std::string type;                                  ///< in the file
  at::ScalarType dtype = at::ScalarType::Undefined;  ///< Undefined for a type that is not read
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  ///< within the data
};

Entry parse_entry(const std::string& name, const Json& json) {
  const auto wrong = [&](const char* what) {
    refuse(fmt::format("the {} of its tensor '{}' is not as the format has it", what,
                       base::printable(name)));
  };
  if (!json.is_object()) wrong("entry");
  const auto type = json.find("dtype");
  const auto shape = json.find("shape");
  const auto offsets = json.find("data_offsets");
  Entry entry;
  entry.name = name;
  if (type == json.end() || !type->is_string()) wrong("dtype");
  const auto known = std::ranges::find(kTypes, type->get<std::string>(),
                                       &std::pair<std::string_view, at::ScalarType>::first);
  entry.type = type->get<std::string>();
  if (known != std::end(kTypes)) entry.dtype = known->second;
  if (shape == json.end() || !shape->is_array() || shape->size() > kMaxSizes) wrong("shape");
  const bool is_known = entry.dtype != at::ScalarType::Undefined;
  auto bytes = static_cast<int64_t>(is_known ? c10::elementSize(entry.dtype) : 1);
  bool is_empty = false;
  for (const Json& size : *shape) {
    if (!size.is_number_unsigned()) wrong("shape");
    const auto side = size.get<int64_t>();
    is_empty = is_empty || side == 0;
    // The strides of an empty tensor must not overflow either.
    if (side < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(side, 1), &bytes)) {
      wrong("shape");
    }
    entry.shape.push_back(side);
  }
  if (is_empty) bytes = 0;
  const bool has_offsets = offsets != json.end() && offsets->is_array() && offsets->size() == 2 &&
                           (*offsets)[0].is_number_unsigned() && (*offsets)[1].is_number_unsigned();
  if (!has_offsets) wrong("data_offsets");
  entry.begin = (*offsets)[0].get<uint64_t>();
  entry.end = (*offsets)[1].get<uint64_t>();
  if (entry.end < entry.begin ||
      (is_known && entry.end - entry.begin != static_cast<uint64_t>(bytes))) {
    wrong("data_offsets");
  }
  return entry;
}

/// Sorts the tensors by position. @throws base::UserError if they do not fill the data exactly
void arrange(std::vector<Entry>& entries, uint64_t size) {
  std::ranges::sort(entries, {},
                    [](const Entry& entry) { return std::pair(entry.begin, entry.end); });
  uint64_t at = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != at) refuse("its tensors overlap, or leave holes");
    at = entry.end;
  }
  if (at != size) {
    refuse(fmt::format("it has {} bytes of data and describes {}; it is probably truncated", size,
                       at));
  }
}

/// Parses entry by entry: JSON values take many times the memory of their text.
std::vector<Entry> parse_header(std::string_view text) {
  std::vector<Entry> entries;
  std::string name;
  size_t values = 0;
  const auto visit = [&](int depth, Json::parse_event_t event, Json& parsed) {
    using Event = Json::parse_event_t;
    if (depth > kMaxDepth) refuse("its header is nested deeper than the format has it");
    if (event == Event::key) {
      if (depth > 1) return true;
      name = parsed.get<std::string>();
      values = 0;
      return true;
    }
    if (depth == 0 || name == kMetadata) return depth == 0;
    if (++values > kMaxEntryValues) {
      refuse(fmt::format("the entry of its tensor '{}' is too long", base::printable(name)));
    }
    const bool is_whole = event != Event::object_start && event != Event::array_start;
    if (depth > 1 || !is_whole) return true;
    entries.push_back(parse_entry(name, parsed));
    return false;
  };
  const Json header = Json::parse(text, visit, /*allow_exceptions=*/false);
  if (!header.is_object()) refuse("its header is not JSON");
  return entries;
}

}  // namespace

StateDict read_safetensors(const MappedFile& file) {
  const std::string_view bytes = file.bytes();
  if (bytes.size() < sizeof(uint64_t)) refuse("it is too short");
  const auto size = read_le<uint64_t>(bytes, 0);
  if (size > kMaxHeader) {
    refuse(fmt::format("its header has {} bytes; at most {} are read", size, kMaxHeader));
  }
  if (size > bytes.size() - sizeof(uint64_t)) refuse("it is truncated");
  std::vector<Entry> entries = parse_header(bytes.substr(sizeof(uint64_t), size));
  const std::string_view data = bytes.substr(sizeof(uint64_t) + size);
  arrange(entries, data.size());
  StateDict all;
  for (const Entry& entry : entries) {
    if (entry.dtype == at::ScalarType::Undefined) {
      all.unread[entry.name] = entry.type;
      continue;
    }
    const std::string_view part = data.substr(entry.begin, entry.end - entry.begin);
    at::Tensor tensor = at::empty({0}, at::TensorOptions(entry.dtype));
    std::vector<int64_t> strides(entry.shape.size(), 1);
    for (size_t i = strides.size(); i-- > 1;) {
      strides[i - 1] = strides[i] * std::max<int64_t>(entry.shape[i], 1);
    }
    tensor.set_(file.storage(part, c10::elementSize(entry.dtype)), 0, entry.shape, strides);
    if (all.contains(entry.name)) {
      refuse(fmt::format("it has two tensors '{}'", base::printable(entry.name)));
    }
    all.insert(entry.name, tensor);
  }
  return all;
}

void write_safetensors(const StateDict& tensors, const std::function<void(std::string_view)>& sink,
                       const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  header[kMetadata] = {{"format", "pt"}};
  header[kMetadata].update(nlohmann::ordered_json(metadata));
  uint64_t at = 0;
  for (const auto& item : tensors) {
    const at::Tensor& tensor = item.value();
    const auto known = std::ranges::find(kTypes, tensor.scalar_type(),
                                         &std::pair<std::string_view, at::ScalarType>::second);
    if (known == std::end(kTypes)) {
      refuse(fmt::format(
          "safetensors has no type for the tensor '{}' of {}; write a .pth file instead",
          item.key(), c10::toString(tensor.scalar_type())));
    }
    header[item.key()] = {{"dtype", known->first},
                          {"shape", tensor.sizes().vec()},
                          {"data_offsets", {at, at + tensor.nbytes()}}};
    at += tensor.nbytes();
  }
  std::string text = header.dump();
  text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  const uint64_t size = text.size();
  sink({reinterpret_cast<const char*>(&size), sizeof size});
  sink(text);
  for (const auto& item : tensors) {
    const at::Tensor host = item.value().detach().cpu().contiguous();
    sink({static_cast<const char*>(host.const_data_ptr()), host.nbytes()});
  }
}

}  // namespace syncbn::models::detail
