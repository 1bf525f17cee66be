// Feeds bytes of two clients by turns to the workers' store.
#include <cstdint>
#include <string>
#include <string_view>

#include "require.h"
#include "store/store_answers.h"
#include "store/store_protocol.h"

namespace {

using namespace syncbn::launch;

/// Finds the end of the first query, which must be the same in pieces as in one.
store::QueryScanner scan(std::string_view bytes, store::QueryScanner::Result& result) {
  store::QueryScanner whole;
  result = whole.scan(bytes);
  store::QueryScanner pieces;
  auto last = store::QueryScanner::Result::kIncomplete;
  for (size_t size = 0; size <= bytes.size() && last == store::QueryScanner::Result::kIncomplete;
       size += 1 + size / 2) {
    last = pieces.scan(bytes.substr(0, size));
  }
  if (last == store::QueryScanner::Result::kIncomplete) last = pieces.scan(bytes);
  require(last == result);
  require(result != store::QueryScanner::Result::kComplete || pieces.size() == whole.size());
  return whole;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kMaxAnswer = 1 << 16;
  std::string_view bytes(reinterpret_cast<const char*>(data), size);
  StoreAnswers answers([](uint64_t client) { require(client < 2); }, kMaxAnswer);
  for (uint64_t client = 0;; client = 1 - client) {
    auto result = store::QueryScanner::Result::kIncomplete;
    const auto scanner = scan(bytes, result);
    if (result != store::QueryScanner::Result::kComplete) break;
    require(scanner.size() <= bytes.size());
    const std::string_view query = bytes.substr(0, scanner.size());
    const bool greets = store::QueryReader(query).query() == store::Query::kValidate;
    std::string out;
    if (!greets) answers.answer(client, query, out);
    bytes.remove_prefix(scanner.size());
  }
  // Keys and values come from the input, which bounds the answers.
  require(answers.bytes() <= 200 * size);
  answers.remove(0);
  answers.remove(1);
  return 0;
}
