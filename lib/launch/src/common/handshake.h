#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "common/link_protection.h"

namespace syncbn::launch {

/// What a launcher and the coordinator exchange before anything else, as lines:
///
///   launcher → coordinator   syncbn-agent 3           or, with a token: syncbn-agent 3 token NONCE
///                                                     and with --tls:   syncbn-agent 3 tls NONCE
///   coordinator → launcher   challenge NONCE          only with a token, as all that follows
///   launcher → coordinator   proof MAC
///   coordinator → launcher   proof MAC
///
/// Both have to know the job's token, which itself is never sent. A MAC is the HMAC-SHA256, by the
/// token, of the sender's side and both nonces, which are new for each connection: a recorded proof
/// is worthless. What follows is protected by more such keys, one for TLS or one for the messages
/// of each direction. The first byte distinguishes a launcher from a client of the store. Not
/// thread-safe.
class Handshake {
 public:
  enum class Side { kLauncher, kCoordinator };

  /// @param token empty: the job has none.
  /// @param tls the link continues in TLS; needs a token.
  Handshake(Side side, std::string token, bool tls = false);

  /// The launcher's first line, with its newline.
  std::string begin();
  /// Whether the other side's next line may begin with these bytes: false for those of a program
  /// that is no launcher, which may never end a line.
  bool may_begin_with(std::string_view bytes) const;
  /// Processes the other side's next line. Returns what to send, with its newline, or "".
  std::string take(std::string_view line);

  /// Whether messages may follow.
  bool is_done() const { return done_; }
  /// Of the messages that follow; null without a token.
  std::unique_ptr<LinkProtection> protection() const;
  /// Why the handshake has failed, or "".
  const std::string& failure() const { return failure_; }

 private:
  std::string take_greeting(std::string_view line);
  std::string fail(const std::string& why);
  Side other() const { return side_ == Side::kLauncher ? Side::kCoordinator : Side::kLauncher; }
  /// The HMAC of both nonces, for a side's proof or as a key.
  std::string mac(Side side, std::string_view purpose) const;
  std::string proof(Side side) const;

  Side side_;
  std::string token_;
  bool tls_;
  std::string launchers_nonce_;
  std::string coordinators_nonce_;
  bool done_ = false;
  std::string failure_;
};

/// A token that nobody can guess: 256 random bits in hexadecimal digits.
std::string make_token();

/// The job's token: the first line of the file or, if `file` is empty, that of the variable
/// SYNCBN_TOKEN, which is removed from the environment, so that workers do not get it. Empty if
/// neither is given.
/// @throws base::UserError if the file cannot be read, if others than its owner can read it, or if
/// the token has fewer than 16 bytes.
std::string read_token(const std::string& file);

}  // namespace syncbn::launch
