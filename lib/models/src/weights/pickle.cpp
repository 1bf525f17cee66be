#include "weights/pickle.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <cstring>
#include <optional>

#include <syncbn/base/error.h>

namespace syncbn::models::detail {
namespace {

using Kind = Value::Kind;
using Items = std::vector<const Value*>;

// Allowances for the smallest file.
constexpr size_t kFreeValues = 64'000;
constexpr size_t kFreeContent = 500'000;
constexpr size_t kMaxDims = 64;
constexpr size_t kMaxMarks = 1000;  // containers that are open at the same time

/// The opcodes of Python's pickletools that torch.save's protocol 2 and protocols up to 5 use.
enum Opcode : unsigned char {
  kMark = '(',
  kStop = '.',
  kPop = '0',
  kBinFloat = 'G',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kNone = 'N',
  kBinPersId = 'Q',
  kReduce = 'R',
  kBinString = 'T',
  kShortBinString = 'U',
  kBinUnicode = 'X',
  kAppend = 'a',
  kBuild = 'b',
  kGlobal = 'c',
  kAppends = 'e',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kTuple = 't',
  kSetItems = 'u',
  kEmptyDict = '}',
  kEmptyList = ']',
  kEmptyTuple = ')',
  kBinBytes = 'B',
  kShortBinBytes = 'C',
  kProto = 0x80,
  kEmptySet = 0x8f,
  kAddItems = 0x90,
  kFrozenSet = 0x91,
  kNewObj = 0x81,
  kNewObjEx = 0x92,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kByteArray8 = 0x96,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
};

[[noreturn]] void fail(const std::string& why) {
  throw base::UserError("its pickle " + why);
}

[[noreturn]] void fail_damaged() {
  fail("is damaged");
}

/// The type that Python calls "torch.uint16"; std::nullopt if libtorch cannot convert it on CPUs.
std::optional<at::ScalarType> element_type(const std::string& name) {
  constexpr std::string_view kTorch = "torch.";
  const auto& all = c10::getStringToDtypeMap();
  const auto found = name.starts_with(kTorch) ? all.find(name.substr(kTorch.size())) : all.end();
  if (found == all.end()) return std::nullopt;
  const at::ScalarType type = found->second;
  const bool is_number = at::isIntegralType(type, /*includeBool=*/true) ||
                         at::isFloatingType(type) || at::isComplexType(type);
  return is_number && type != at::kFloat4_e2m1fn_x2 ? std::optional(type) : std::nullopt;
}

/// The integers of a tuple.
std::vector<int64_t> integers(const Value& tuple) {
  if (tuple.kind != Kind::kTuple || tuple.items.size() > kMaxDims) fail_damaged();
  std::vector<int64_t> all;
  for (const Value* const item : tuple.items) {
    if (item->kind != Kind::kInt || item->integer < 0) fail_damaged();
    all.push_back(item->integer);
  }
  return all;
}

/// A tensor over a storage, whose elements must lie within the storage.
at::Tensor tensor_over(const Value& storage, int64_t offset, const std::vector<int64_t>& sizes,
                       const std::vector<int64_t>& strides) {
  if (storage.kind != Kind::kStorage || offset < 0 || sizes.size() != strides.size()) {
    fail_damaged();
  }
  const auto element_size = static_cast<int64_t>(c10::elementSize(storage.dtype));
  const int64_t elements = static_cast<int64_t>(storage.storage.nbytes()) / element_size;
  int64_t last = offset;
  bool is_empty = false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    is_empty = is_empty || sizes[i] == 0;
    int64_t way = 0;
    if (sizes[i] > 0 && __builtin_mul_overflow(sizes[i] - 1, strides[i], &way)) fail_damaged();
    if (__builtin_add_overflow(last, way, &last)) fail_damaged();
  }
  int64_t count = 1;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(count, size, &count)) fail_damaged();
  }
  if (!is_empty && last >= elements) fail("has a tensor that reaches beyond its data");
  at::Tensor tensor = at::empty({0}, at::TensorOptions(storage.dtype));
  tensor.set_(storage.storage, is_empty ? 0 : offset, sizes, strides);
  return tensor;
}

}  // namespace

std::vector<std::pair<std::string, const Value*>> Value::entries() const {
  std::vector<std::pair<std::string, const Value*>> all;
  for (size_t i = 0; kind == Kind::kDict && i + 1 < items.size(); i += 2) {
    if (items[i]->is_text()) all.emplace_back(items[i]->text, items[i + 1]);
  }
  return all;
}

at::ScalarType storage_type(const std::string& name) {
  using enum at::ScalarType;
  if (name == "torch.storage.UntypedStorage") return Byte;
  // Only the sizes of quantized numbers are used: their tensors are not read.
  if (name.starts_with("torch.Q")) return name == "torch.QInt32Storage" ? at::kInt : at::kByte;
  for (const at::ScalarType type : {Float, Double, Half, BFloat16, ComplexFloat, ComplexDouble,
                                    Long, Int, Short, Char, Byte, Bool}) {
    if (name == fmt::format("torch.{}Storage", c10::toString(type))) return type;
  }
  fail_damaged();
}

Values::Values(size_t file_bytes)
    : max_values_(kFreeValues + file_bytes), max_content_(kFreeContent + file_bytes) {}

Value& Values::add(Value value) {
  if (all_.size() >= max_values_) fail(fmt::format("has more than {} values", max_values_));
  charge(value.items.size() + value.text.size());
  return all_.emplace_back(std::move(value));
}

void Values::charge(size_t content) {
  content_ += content;
  if (content_ > max_content_) fail("would take too much memory");
}

Unpickler::Unpickler(std::string_view bytes, Values& values, LoadStorage load_storage)
    : bytes_(bytes), values_(values), load_storage_(std::move(load_storage)) {}

const Value& Unpickler::read() {
  while (step(static_cast<unsigned char>(take(1).front()))) {
  }
  return *pop();
}

std::string_view Unpickler::take(uint64_t size) {
  if (size > bytes_.size() - at_) fail("ends too early; the file is probably truncated");
  const std::string_view taken = bytes_.substr(at_, size);
  at_ += size;
  return taken;
}

std::string_view Unpickler::take_line() {
  const size_t end = bytes_.find('\n', at_);
  if (end == bytes_.npos) fail_damaged();
  const std::string_view line = take(end - at_);
  ++at_;
  return line;
}

Value& Unpickler::push(Value value) {
  Value& added = values_.add(std::move(value));
  stack_.push_back(&added);
  return added;
}

Value* Unpickler::pop() {
  if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) fail_damaged();
  Value* const top = stack_.back();
  stack_.pop_back();
  return top;
}

Items Unpickler::pop_to_mark() {
  if (marks_.empty()) fail_damaged();
  Items items(stack_.begin() + static_cast<ptrdiff_t>(marks_.back()), stack_.end());
  stack_.resize(marks_.back());
  marks_.pop_back();
  return items;
}

void Unpickler::push_text(bool is_bytes, uint64_t size) {
  push({.kind = is_bytes ? Kind::kBytes : Kind::kText, .text = std::string(take(size))});
}

void Unpickler::push_tuple(size_t size) {
  Items items(size);
  for (size_t i = size; i-- > 0;) items[i] = pop();
  push({.kind = Kind::kTuple, .items = std::move(items)});
}

void Unpickler::extend(Kind kind, const Items& items) {
  Value* const container = pop();
  stack_.push_back(container);
  if (container->kind == Kind::kObject) return;
  if (container->kind != kind || (kind == Kind::kDict && items.size() % 2 != 0)) fail_damaged();
  values_.charge(items.size());
  container->items.insert(container->items.end(), items.begin(), items.end());
}

void Unpickler::put(uint64_t place) {
  Value* const top = pop();
  values_.charge(1);
  memo_[place] = top;
  stack_.push_back(top);
}

void Unpickler::get(uint64_t place) {
  const auto found = memo_.find(place);
  if (found == memo_.end()) fail_damaged();
  values_.charge(1);
  stack_.push_back(found->second);
}

void Unpickler::reduce() {
  const Value* const arguments = pop();
  const Value* const function = pop();
  if (arguments->kind != Kind::kTuple) fail_damaged();
  push(function->kind == Kind::kGlobal ? call(function->text, arguments->items)
                                       : Value{.kind = Kind::kObject, .text = function->text});
}

void Unpickler::build() {
  const Value* const state = pop();
  Value* const object = pop();
  // The attributes of all others, such as a state dict's _metadata, are ignored.
  if (object->is_object && state->kind == Kind::kDict) {
    values_.charge(state->items.size());
    object->items = state->items;
  }
  stack_.push_back(object);
}

Value Unpickler::call(const std::string& function, const Items& arguments) {
  const auto argument = [&](size_t i) -> const Value& {
    if (i >= arguments.size()) fail_damaged();
    return *arguments[i];
  };
  if (function == "argparse.Namespace") return {.kind = Kind::kDict, .is_object = true};
  if (function == "collections.OrderedDict" || function == "collections.Counter" ||
      function == "collections.defaultdict") {
    Value dict{.kind = Kind::kDict};
    if (arguments.empty()) return dict;
    // Made from another dictionary or a list of pairs.
    const Value& source = argument(0);
    if (source.kind == Kind::kDict) dict.items = source.items;
    if (source.kind == Kind::kList) {
      for (const Value* const pair : source.items) {
        if (pair->items.size() != 2) fail_damaged();
        dict.items.insert(dict.items.end(), pair->items.begin(), pair->items.end());
      }
    }
    return dict;
  }
  if (function.starts_with("torch._utils._rebuild_parameter") ||
      function.starts_with("torch._utils._rebuild_device_tensor_from_cpu")) {
    return argument(0);
  }
  if (function == "torch._tensor._rebuild_from_type_v2") {  // of a subclass: function, type, args
    const Value& inner = argument(0);
    if (inner.text != function) return call(inner.text, argument(2).items);
  }
  if (function.starts_with("torch._utils._rebuild_tensor")) {
    Value storage = argument(0);
    if (function.ends_with("_v3")) {
      const std::string& name = argument(6).text;
      const auto type = element_type(name);
      if (!type) return {.kind = Kind::kObject, .text = name};
      if (storage.dtype != at::kByte) fail_damaged();  // its alignment may be too small
      storage.dtype = *type;
    }
    at::Tensor tensor =
        tensor_over(storage, argument(1).integer, integers(argument(2)), integers(argument(3)));
    // With more elements than data (stride 0), a copy takes more memory than the file.
    const auto elements = static_cast<size_t>(tensor.numel());
    if (elements > tensor.storage().nbytes() / tensor.element_size()) values_.charge(elements);
    return {.kind = Kind::kTensor, .tensor = std::move(tensor)};
  }
  if (function == "torch.Size" || function == "builtins.set" || function == "__builtin__.set") {
    return {.kind = Kind::kTuple, .items = argument(0).items};
  }
  // copyreg._reconstructor() and NumPy's _reconstruct() receive the class.
  const bool names_class = function.find("._reconstruct") != function.npos && !arguments.empty();
  return {.kind = Kind::kObject, .text = names_class ? argument(0).text : function};
}

bool Unpickler::step(unsigned char code) {
  switch (code) {
    case kProto:
    case kFrame:
      take(code == kProto ? 1 : 8);
      break;
    case kStop:
      return false;
    case kMark:
      if (marks_.size() >= kMaxMarks) fail("is nested too deeply");
      marks_.push_back(stack_.size());
      break;
    case kPop:
      pop();
      break;
    case kNone:
      push({});
      break;
    case kNewTrue:
    case kNewFalse:
      push({.kind = Kind::kBool, .integer = code == kNewTrue ? 1 : 0});
      break;
    case kBinInt:
      push({.kind = Kind::kInt, .integer = number<int32_t>()});
      break;
    case kBinInt1:
      push({.kind = Kind::kInt, .integer = number<uint8_t>()});
      break;
    case kBinInt2:
      push({.kind = Kind::kInt, .integer = number<uint16_t>()});
      break;
    case kLong1: {
      const std::string_view bytes = take(number<uint8_t>());
      if (bytes.size() > sizeof(int64_t)) {
        push({.kind = Kind::kBytes, .text = std::string(bytes)});
        break;
      }
      const bool is_negative = !bytes.empty() && (bytes.back() & 0x80) != 0;
      int64_t integer = is_negative ? -1 : 0;
      std::memcpy(&integer, bytes.data(), bytes.size());
      push({.kind = Kind::kInt, .integer = integer});
      break;
    }
    case kBinFloat: {
      const std::string_view bytes = take(sizeof(double));  // in big-endian order
      const std::string reversed(bytes.rbegin(), bytes.rend());
      push({.kind = Kind::kFloat, .number = read_le<double>(reversed, 0)});
      break;
    }
    case kBinUnicode:
    case kBinString:
    case kBinBytes:
      push_text(code == kBinBytes, number<uint32_t>());
      break;
    case kShortBinUnicode:
    case kShortBinString:
    case kShortBinBytes:
      push_text(code == kShortBinBytes, number<uint8_t>());
      break;
    case kBinUnicode8:
    case kByteArray8:
      push_text(code == kByteArray8, number<uint64_t>());
      break;
    case kEmptyDict:
      push({.kind = Kind::kDict});
      break;
    case kEmptyList:
    case kEmptySet:
      push({.kind = Kind::kList});
      break;
    case kEmptyTuple:
      push({.kind = Kind::kTuple});
      break;
    case kFrozenSet:
    case kTuple:
      push({.kind = Kind::kTuple, .items = pop_to_mark()});
      break;
    case kTuple1:
    case kTuple2:
    case kTuple3:
      push_tuple(code - kTuple1 + 1);
      break;
    case kAppend:
      extend(Kind::kList, {pop()});
      break;
    case kAppends:
    case kAddItems:
      extend(Kind::kList, pop_to_mark());
      break;
    case kSetItem: {
      const Value* const value = pop();
      const Value* const key = pop();
      extend(Kind::kDict, {key, value});
      break;
    }
    case kSetItems:
      extend(Kind::kDict, pop_to_mark());
      break;
    case kGlobal: {
      const std::string module(take_line());
      push({.kind = Kind::kGlobal, .text = module + "." + std::string(take_line())});
      break;
    }
    case kStackGlobal: {
      const Value* const name = pop();
      const Value* const module = pop();
      push({.kind = Kind::kGlobal, .text = module->text + "." + name->text});
      break;
    }
    case kNewObjEx:
      pop();  // keyword arguments
      [[fallthrough]];
    case kNewObj:
    case kReduce:
      reduce();
      break;
    case kBuild:
      build();
      break;
    case kBinPersId: {
      const Value* const id = pop();
      // Before torch 1.6 a class of modules came with its source.
      const bool is_class = id->items.size() > 1 && id->items[0]->text == "module";
      push(is_class ? *id->items[1] : load_storage_(*id));
      break;
    }
    case kBinPut:
    case kLongBinPut:
      put(code == kBinPut ? number<uint8_t>() : number<uint32_t>());
      break;
    case kMemoize:
      put(memo_.size());
      break;
    case kBinGet:
    case kLongBinGet:
      get(code == kBinGet ? number<uint8_t>() : number<uint32_t>());
      break;
    default:
      fail(fmt::format("has the opcode {:#04x}, which torch.save does not write", code));
  }
  return true;
}

}  // namespace syncbn::models::detail
