#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "weights/little_endian.h"

namespace syncbn::models::detail {

/// A Python value. Containers refer to values of the same Values; they may contain themselves.
struct Value {
  enum class Kind {
    kNone,
    kBool,     ///< integer: 0 or 1
    kInt,      ///< integer
    kFloat,    ///< number
    kText,     ///< text, in UTF-8
    kBytes,    ///< text; also integers of more than 64 bits, as in the file
    kTuple,    ///< items; torch.Size and protocol 2's sets as well
    kList,     ///< items; sets of later protocols as well
    kDict,     ///< items: keys and values in turn
    kGlobal,   ///< text: "collections.OrderedDict"
    kObject,   ///< a Python object that is not read; text: its type, or the function that makes it
    kStorage,  ///< storage, dtype
    kTensor,   ///< tensor
  };

  Kind kind = Kind::kNone;
  at::ScalarType dtype = at::kFloat;
  bool is_object = false;  ///< a kDict with an object's attributes
  int64_t integer = 0;
  double number = 0;
  std::string text = {};
  std::vector<const Value*> items = {};
  c10::Storage storage = {};
  at::Tensor tensor = {};

  bool is_unread() const { return kind == Kind::kObject || kind == Kind::kGlobal; }
  bool is_text() const { return kind == Kind::kText; }
  /// The values of text keys; empty if this is not a dictionary.
  std::vector<std::pair<std::string, const Value*>> entries() const;
};

/// Owns values. Its limits grow with the file, so that a small file cannot take much memory.
class Values {
 public:
  /// @param file_bytes of the file that they are read from
  explicit Values(size_t file_bytes);

  /// @throws base::UserError beyond 64,000 values plus one per byte of the file, and like charge().
  Value& add(Value value);

  /// Counts the content of values: items, bytes of text and references. A file of a few bytes can
  /// ask for copies of copies; what torch.save writes has less content than bytes.
  /// @throws base::UserError beyond 500,000 plus one per byte of the file.
  void charge(size_t content);

 private:
  size_t max_values_;
  size_t max_content_;
  size_t content_ = 0;
  std::deque<Value> all_;
};

/// The type of the elements of "torch.FloatStorage" and so on.
/// @throws base::UserError for another name.
at::ScalarType storage_type(const std::string& name);

/// Reads one pickle of torch.save's: tensors, numbers, text and containers. Executes nothing: any
/// other object becomes a placeholder (Value::Kind::kObject).
class Unpickler {
 public:
  /// Returns the storage with a persistent id.
  using LoadStorage = std::function<Value(const Value& id)>;

  /// @param bytes that begin with the pickle
  /// @param values owns the values read
  Unpickler(std::string_view bytes, Values& values, LoadStorage load_storage);

  /// @throws base::UserError saying what is wrong with the pickle.
  const Value& read();

  /// The pickle's size in bytes, after read().
  size_t size() const { return at_; }

 private:
  std::string_view take(uint64_t size);
  std::string_view take_line();
  template <class Number>
  Number number() {
    return read_le<Number>(take(sizeof(Number)), 0);
  }

  Value& push(Value value);
  Value* pop();
  std::vector<const Value*> pop_to_mark();
  void push_text(bool is_bytes, uint64_t size);
  void push_tuple(size_t size);
  void extend(Value::Kind kind, const std::vector<const Value*>& items);
  void put(uint64_t place);
  void get(uint64_t place);
  void reduce();
  void build();
  Value call(const std::string& function, const std::vector<const Value*>& arguments);
  /// Runs an opcode. Returns false after the last one.
  bool step(unsigned char code);

  std::string_view bytes_;
  size_t at_ = 0;
  Values& values_;
  LoadStorage load_storage_;
  std::vector<Value*> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, Value*> memo_;
};

}  // namespace syncbn::models::detail
