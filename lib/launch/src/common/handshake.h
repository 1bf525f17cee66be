#pragma once

#include <syncbn/base/handshake.h>

#include <string>

namespace syncbn::launch {

/// base::Handshake between a launcher (the client) and the coordinator, with the job's token. Its
/// first byte distinguishes a launcher from a client of the store.
class Handshake : public base::Handshake {
 public:
  /// @param token empty: the job has none.
  Handshake(Side side, std::string token);
};

/// The job's token: the first line of the file or, if `file` is empty, that of the variable
/// SYNCBN_TOKEN, which is removed from the environment, so that workers do not get it. Empty if
/// neither is given.
/// @throws base::UserError if the file cannot be read, if others than its owner can read it, if the
/// token has fewer than 16 bytes, or if OpenSSL, which computes its proofs, cannot be loaded.
std::string read_token(const std::string& file);

}  // namespace syncbn::launch
