#include "common/rank_0.h"

#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>

#include <algorithm>
#include <exception>
#include <vector>

#include "common/out_of_memory.h"

namespace syncbn::train {

bool is_rank_0() {
  return dist::rank() == 0;
}

std::string on_rank_0(const std::function<std::string()>& work) {
  // The message is a byte with the exit code and, after code 0, the result.
  const auto send = [](int exit_code, const std::string& result) {
    dist::broadcast_bytes(static_cast<char>(exit_code) + result, 0);
  };
  if (!is_rank_0()) {
    const std::string answer = dist::broadcast_bytes("", 0);
    const int exit_code = static_cast<unsigned char>(answer.at(0));
    if (exit_code != base::kExitOk) throw QuietExit{exit_code};
    return answer.substr(1);
  }
  std::string result;
  try {
    result = explain_out_of_memory(MemoryUse::kLater, work);
  } catch (const std::exception& error) {
    try {
      send(base::exit_code_of(error), "");
    } catch (const base::UnavailableError&) {
      // Another rank has failed as well. Report the first error.
    }
    throw;
  }
  send(base::kExitOk, result);
  return result;
}

void do_on_rank_0(const std::function<void()>& work) {
  on_rank_0([&] {
    work();
    return std::string();
  });
}

void on_each_rank(const std::function<void()>& work) {
  std::exception_ptr failure;
  int code = base::kExitOk;
  try {
    explain_out_of_memory(MemoryUse::kLater, work);
  } catch (const std::exception& error) {
    failure = std::current_exception();
    code = base::exit_code_of(error);
  }
  std::vector<std::string> codes;
  try {
    codes = dist::all_gather_bytes(std::to_string(code));
  } catch (const base::UnavailableError&) {
    // Another rank has failed as well. Report the first error.
    if (failure) std::rethrow_exception(failure);
    throw;
  }
  const auto first =
      std::ranges::find_if(codes, [](const std::string& other) { return other != "0"; });
  if (first == codes.end()) return;
  if (first - codes.begin() == dist::rank()) std::rethrow_exception(failure);
  throw QuietExit{std::stoi(*first)};
}

}  // namespace syncbn::train
