#include "weights/pickle.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <utility>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include "weights/little_endian.h"

namespace syncbn::models::detail {
namespace {

using Kind = Value::Kind;
using Items = std::vector<const Value*>;

constexpr size_t kMaxValues = 1'000'000;
constexpr size_t kMaxContent = 16'000'000;
// Allowances for the smallest file. Larger files may have one more value per kBytesOfValue bytes: a
// tensor takes about 20 values in a pickle.
constexpr size_t kFreeValues = 64'000;
constexpr size_t kFreeContent = 500'000;
constexpr size_t kBytesOfValue = 16;
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
  kNewObj = 0x81,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
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

const std::map<std::string_view, at::ScalarType>& storage_types() {
  static const std::map<std::string_view, at::ScalarType> all = {
      {"torch.FloatStorage", at::kFloat},
      {"torch.DoubleStorage", at::kDouble},
      {"torch.HalfStorage", at::kHalf},
      {"torch.BFloat16Storage", at::kBFloat16},
      {"torch.ComplexFloatStorage", at::kComplexFloat},
      {"torch.ComplexDoubleStorage", at::kComplexDouble},
      {"torch.LongStorage", at::kLong},
      {"torch.IntStorage", at::kInt},
      {"torch.ShortStorage", at::kShort},
      {"torch.CharStorage", at::kChar},
      {"torch.ByteStorage", at::kByte},
      {"torch.BoolStorage", at::kBool},
      {"torch.storage.UntypedStorage", at::kByte},
  };
  return all;
}

constexpr std::array kObjects = {"argparse.Namespace"};
constexpr std::array kFunctions = {
    "collections.OrderedDict",
    "collections.Counter",
    "builtins.set",
    "__builtin__.set",
    "torch.Size",
    "torch.device",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
};

bool is_allowed(std::string_view name) {
  const auto is_it = [&](std::string_view other) { return other == name; };
  return std::ranges::any_of(kObjects, is_it) || std::ranges::any_of(kFunctions, is_it) ||
         storage_types().contains(name);
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

const Value* Value::find(std::string_view key) const {
  if (kind != Kind::kDict) return nullptr;
  const Value* found = nullptr;
  for (size_t i = 0; i + 1 < items.size(); i += 2) {
    if (items[i]->is_text() && items[i]->text == key) found = items[i + 1];
  }
  return found;
}

at::ScalarType storage_type(const std::string& name) {
  const auto found = storage_types().find(name);
  if (found == storage_types().end()) fail_damaged();
  return found->second;
}

Values::Values(size_t file_bytes)
    : max_values_(std::min(kMaxValues, kFreeValues + file_bytes / kBytesOfValue)),
      max_content_(std::min(kMaxContent, kFreeContent + file_bytes)) {}

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

template <class Number>
Number Unpickler::read_number(std::string_view bytes) {
  return read_le<Number>(bytes, 0);
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

void Unpickler::push_tuple(size_t size) {
  Items items(size);
  for (size_t i = size; i-- > 0;) items[i] = pop();
  push({.kind = Kind::kTuple, .items = std::move(items)});
}

void Unpickler::push_global(const std::string& name) {
  if (!is_allowed(name)) {
    fail(fmt::format(
        "needs the Python object {}, which weights do not consist of (nothing was executed); save "
        "model.state_dict() instead",
        base::printable(name)));
  }
  push({.kind = Kind::kGlobal, .text = name});
}

void Unpickler::extend(Kind kind, const Items& items) {
  Value* const container = pop();
  if (container->kind != kind || (kind == Kind::kDict && items.size() % 2 != 0)) fail_damaged();
  values_.charge(items.size());
  container->items.insert(container->items.end(), items.begin(), items.end());
  stack_.push_back(container);
}

void Unpickler::put(uint64_t place) {
  constexpr size_t kEntry = 24;  // content charged for a node of memo_
  Value* const top = pop();
  values_.charge(kEntry);
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
  if (function->kind != Kind::kGlobal || arguments->kind != Kind::kTuple) fail_damaged();
  push(call(function->text, arguments->items));
}

void Unpickler::build() {
  const Value* const state = pop();
  Value* const object = pop();
  // All other objects are dictionaries, whose attributes (a state dict's _metadata) are ignored.
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
  if (function.starts_with("collections.")) {
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
  if (function == "torch._utils._rebuild_parameter") {
    if (argument(0).kind != Kind::kTensor) fail_damaged();
    return argument(0);
  }
  if (function.starts_with("torch._utils._rebuild_tensor")) {
    at::Tensor tensor =
        tensor_over(argument(0), argument(1).integer, integers(argument(2)), integers(argument(3)));
    // With more elements than data (stride 0), a copy takes more memory than the file.
    const auto elements = static_cast<size_t>(tensor.numel());
    if (elements > tensor.storage().nbytes() / tensor.element_size()) values_.charge(elements);
    return {.kind = Kind::kTensor, .tensor = std::move(tensor)};
  }
  if (function == "torch.device") {
    if (!argument(0).is_text()) fail_damaged();
    return argument(0);
  }
  if (function == "torch.Size" || function.ends_with(".set")) {
    return {.kind = Kind::kTuple, .items = argument(0).items};
  }
  fail_damaged();
}

bool Unpickler::step(unsigned char code) {
  switch (code) {
    case kProto:
      take(1);
      break;
    case kFrame:
      take(8);
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
      std::string bytes(take(sizeof(double)));  // in big-endian order
      std::ranges::reverse(bytes);
      push({.kind = Kind::kFloat, .number = read_le<double>(bytes, 0)});
      break;
    }
    case kBinUnicode:
    case kBinString:
      push({.kind = Kind::kText, .text = std::string(take(number<uint32_t>()))});
      break;
    case kShortBinUnicode:
    case kShortBinString:
      push({.kind = Kind::kText, .text = std::string(take(number<uint8_t>()))});
      break;
    case kBinUnicode8:
      push({.kind = Kind::kText, .text = std::string(take(number<uint64_t>()))});
      break;
    case kBinBytes:
      push({.kind = Kind::kBytes, .text = std::string(take(number<uint32_t>()))});
      break;
    case kShortBinBytes:
      push({.kind = Kind::kBytes, .text = std::string(take(number<uint8_t>()))});
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
    case kTuple:
      push({.kind = Kind::kTuple, .items = pop_to_mark()});
      break;
    case kTuple1:
    case kTuple2:
    case kTuple3:
      push_tuple(code - kTuple1 + 1);
      break;
    case kAppend: {
      const Value* const item = pop();
      extend(Kind::kList, {item});
      break;
    }
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
      push_global(module + "." + std::string(take_line()));
      break;
    }
    case kStackGlobal: {
      const Value* const name = pop();
      const Value* const module = pop();
      push_global(module->text + "." + name->text);
      break;
    }
    case kReduce:
      reduce();
      break;
    case kNewObj: {
      pop();  // its arguments
      const Value* const type = pop();
      const bool is_object = std::ranges::find(kObjects, type->text) != kObjects.end();
      if (type->kind != Kind::kGlobal || !is_object) fail_damaged();
      push({.kind = Kind::kDict, .is_object = true});
      break;
    }
    case kBuild:
      build();
      break;
    case kBinPersId: {
      const Value* const id = pop();
      push(load_storage_(*id));
      break;
    }
    case kBinPut:
      put(number<uint8_t>());
      break;
    case kLongBinPut:
      put(number<uint32_t>());
      break;
    case kMemoize:
      put(memo_.size());
      break;
    case kBinGet:
      get(number<uint8_t>());
      break;
    case kLongBinGet:
      get(number<uint32_t>());
      break;
    default:
      fail(fmt::format("has the opcode {:#04x}, which torch.save does not write", code));
  }
  return true;
}

}  // namespace syncbn::models::detail
