#pragma once

#include <syncbn/base/store_greeting.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

/// The protocol of c10d's TCPStore. A query is a number and its fields; answers have the order of
/// the queries. Integers are in the host's byte order; a string follows its length in 8 bytes. The
/// first query of a connection is kValidate.
namespace syncbn::launch::store {

/// As in torch's TCPStoreBackend.hpp; kBarrier since torch 2.15.
enum class Query : uint8_t {
  kValidate,    ///< magic number; no answer
  kSet,         ///< key, value; no answer
  kCompareSet,  ///< key, expected, desired; the value afterwards
  kGet,         ///< key; the value, "" when there is none
  kAdd,         ///< key, 8-byte amount; the sum in 8 bytes
  kCheck,       ///< keys; kReady or kNotReady
  kWait,        ///< keys; kStopWaiting once all are set
  kGetNumKeys,  ///< the number in 8 bytes
  kDeleteKey,   ///< key; how many were deleted in 8 bytes
  kAppend,      ///< key, value; no answer
  kMultiGet,    ///< keys; the values
  kMultiSet,    ///< pairs of key and value; no answer
  kCancelWait,  ///< kWaitCanceled, even when kStopWaiting has just been sent
  kPing,        ///< 4-byte number; the same
  kQueuePush,   ///< key, value; no answer
  kQueuePop,    ///< key; the length before in 8 bytes, and the value unless that was 0
  kQueueLen,    ///< key; the length in 8 bytes
  kListKeys,    ///< their number in 8 bytes, and the keys
  kBarrier,     ///< key, 8-byte world size; kStopWaiting once that many clients have sent it
};

constexpr uint32_t kMagic = base::kStoreMagic;

// Answers of one byte.
constexpr uint8_t kReady = 0;
constexpr uint8_t kNotReady = 1;
constexpr uint8_t kStopWaiting = 0;
constexpr uint8_t kWaitCanceled = 1;

// The limits of torch's server.
constexpr size_t kMaxKeySize = size_t{8} << 10;
constexpr size_t kMaxValueSize = size_t{8} << 20;
constexpr size_t kMaxKeys = size_t{128} << 10;
/// Our own limit: those above together allow a terabyte.
constexpr size_t kMaxMessageSize = size_t{256} << 20;

/// Whether the query's first field is a key.
bool begins_with_key(Query query);

/// TCPStore's methods put a prefix before their callers' keys.
inline std::string wire_key(std::string_view key) {
  return std::string("/").append(key);
}

template <std::integral Integer>
void put_field(std::string& out, Integer value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}
inline void put_field(std::string& out, std::string_view text) {
  put_field<uint64_t>(out, text.size());
  out.append(text);
}
/// Their number, then each.
inline void put_field(std::string& out, const std::vector<std::string>& texts) {
  put_field<uint64_t>(out, texts.size());
  for (const std::string& text : texts) put_field(out, std::string_view(text));
}

/// @param fields integers have the sizes that Query says.
template <class... Fields>
std::string make_query(Query query, const Fields&... fields) {
  std::string bytes(1, static_cast<char>(query));
  (put_field(bytes, fields), ...);
  return bytes;
}

/// @param bytes at least sizeof(Integer).
template <typename Integer>
Integer integer_at(std::string_view bytes) {
  Integer value;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

/// Finds the end of one query in a stream that arrives in pieces. It checks sizes before the bytes
/// arrive, and reads each byte once.
class QueryScanner {
 public:
  enum class Result { kIncomplete, kComplete, kMalformed };

  /// @param bytes the stream from the query's first byte on, as far as it has arrived.
  Result scan(std::string_view bytes);

  /// The size of the query in bytes, once it is complete.
  size_t size() const { return at_; }

 private:
  size_t at_ = 0;
  std::string_view item_;  ///< the layout of one item
  std::string_view rest_;  ///< the part of it that has not been read yet
  uint64_t items_ = 0;     ///< left to read, with the current one
};

/// Reads the fields of a complete query in order.
class QueryReader {
 public:
  explicit QueryReader(std::string_view query) : rest_(query) {}

  Query query() { return static_cast<Query>(integer<uint8_t>()); }

  template <typename Integer>
  Integer integer() {
    const auto value = integer_at<Integer>(rest_);
    rest_.remove_prefix(sizeof(Integer));
    return value;
  }

  std::string string() {
    const auto size = integer<uint64_t>();
    std::string text(rest_.substr(0, size));
    rest_.remove_prefix(size);
    return text;
  }

  /// A count, then that many strings.
  std::vector<std::string> strings() {
    std::vector<std::string> all(integer<uint64_t>());
    for (std::string& one : all) one = string();
    return all;
  }

 private:
  std::string_view rest_;
};

}  // namespace syncbn::launch::store
