#pragma once

#include <syncbn/base/channel.h>

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <syncbn/base/link_protection.h>

namespace syncbn::launch {

/// The JSON of another process or a file. Discarded if it is invalid, or so deep that functions of
/// nlohmann's, which recurse, would take all of the stack.
nlohmann::json parse_json(std::string_view text);

/// Launchers talk in lines of JSON: objects with a "type". Bytes that are not UTF-8 are replaced.
/// @param protection of this connection; null: there is none.
void send_message(base::Channel& channel, const nlohmann::json& message,
                  base::LinkProtection* protection = nullptr);
/// A message as its text.
void send_line(base::Channel& channel, const std::string& line, base::LinkProtection* protection);

/// The next message, if it is complete. Anything else, and what `protection` refuses, ends the
/// channel with EBADMSG, and a message above `max_size` bytes with EMSGSIZE.
std::optional<nlohmann::json> next_message(base::Channel& channel, size_t max_size = SIZE_MAX,
                                           base::LinkProtection* protection = nullptr);

/// What ends a channel with EBADMSG.
inline constexpr const char* kBadMessage =
    "a message that is damaged or not its own: another program writes into the connection, or a "
    "proxy changes it";

/// The text at `key`, as it may be shown or logged: one line, without control characters, and at
/// most 1,000 bytes. @throws nlohmann's exceptions if there is none.
std::string shown_text(const nlohmann::json& message, const char* key);

constexpr int kMaxRanks = 1'000'000;  ///< of a world, in a record or a message

/// Ranks as runs of [first, count, step]: groups of large worlds are mostly rows or columns of a
/// mesh.
nlohmann::json runs_of(const std::vector<int>& ranks);
/// The ranks below kMaxRanks in such runs, `max_count` of them at most. @throws nlohmann's
/// exceptions if `runs` has a different form.
std::vector<int> ranks_in_runs(const nlohmann::json& runs, size_t max_count = kMaxRanks);

}  // namespace syncbn::launch
