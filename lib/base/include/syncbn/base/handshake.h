#pragma once

#include <syncbn/base/channel.h>
#include <syncbn/base/message_seal.h>

#include <memory>
#include <string>
#include <string_view>

namespace syncbn::base {

/// The first lines that two processes exchange:
///
///   client → server   GREETING           or, with a secret: GREETING token NONCE
///   server → client   challenge NONCE    this and the rest only with a secret
///   client → server   proof MAC
///   server → client   proof MAC
///
/// After a client's NONCE, the server answers a failure with `refused REASON`. Both sides must know
/// the secret, which neither sends. A MAC is the HMAC-SHA256, with the secret as its key, of the
/// greeting, the sender's side and both nonces. Nonces are new for each connection, so a recorded
/// proof is worthless. Further HMACs are the keys for the messages of each direction. Not
/// thread-safe.
class Handshake {
 public:
  enum class Side { kClient, kServer };
  /// Upper bound on a line of the handshake, in bytes.
  static constexpr size_t kMaxLine = 1024;

  /// Names for error messages, and the greeting.
  struct Parties {
    std::string greeting;  ///< "NAME VERSION"
    std::string client;    ///< "launcher"
    std::string server;    ///< "node 0"
    std::string secret;    ///< "token"
    std::string source;    ///< where users set the secret: "--token_file, SYNCBN_TOKEN"
  };

  /// @param secret empty: there is none.
  Handshake(Side side, Parties parties, std::string secret);

  /// The client's first line, with its newline.
  std::string begin();
  /// Whether the other side's next line may begin with these bytes. False for a program that is not
  /// a client, which may never end its line.
  bool may_begin_with(std::string_view bytes) const;
  /// Processes the other side's next line. Returns what to send, with its newline, or "".
  std::string take(std::string_view line);
  /// Processes and answers the lines that have arrived. Returns is_done().
  bool advance(Channel& channel);

  /// Whether messages may follow.
  bool is_done() const { return done_; }
  /// Why the handshake has failed, or "".
  const std::string& failure() const { return failure_; }

  /// Seals the messages that follow; null without a secret.
  std::unique_ptr<MessageSeal> protection() const;

 private:
  std::string take_greeting(std::string_view line);
  std::string fail(const std::string& why);
  Side other() const { return side_ == Side::kClient ? Side::kServer : Side::kClient; }
  /// The HMAC of the greeting, `purpose`, `side` and both nonces: a proof, or a key.
  std::string mac(Side side, std::string_view purpose) const;
  std::string proof(Side side) const;

  Side side_;
  Parties parties_;
  std::string secret_;
  std::string clients_nonce_;
  std::string servers_nonce_;
  bool done_ = false;
  std::string failure_;
};

/// 256 random bits in hexadecimal digits.
std::string make_secret();

}  // namespace syncbn::base
