#include "common/tls_link.h"

#include <syncbn/base/error.h>

#ifdef SYNCBN_HAVE_OPENSSL

#include <dlfcn.h>
#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <syncbn/base/byte_queue.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <new>
#include <optional>
#include <string_view>
#include <utility>

namespace syncbn::launch {
namespace {

[[noreturn]] void fail_to_load(const std::string& why, const char* advice) {
  throw base::UserError(
      fmt::format("--tls: cannot use OpenSSL: {}; {}, or leave --tls out", why, advice));
}

/// The functions of libssl, and of libcrypto behind it, that are called here. They are loaded when
/// --tls asks for them: linked to the launcher, they would add milliseconds to every start.
struct OpenSsl {
  /// @throws base::UserError if it cannot be loaded.
  static const OpenSsl& get() {
    static const OpenSsl kLoaded;
    return kLoaded;
  }

  struct Symbol {
    void* address;
    template <class Function>
    operator Function*() const {
      return reinterpret_cast<Function*>(address);
    }
  };
  Symbol symbol(const char* name) const {
    void* const address = ::dlsym(library_, name);
    if (address == nullptr) fail_to_load(::dlerror(), "update it");
    return {address};
  }

  static void* load() {
    const std::string name = fmt::format("libssl.so.{}", OPENSSL_SHLIB_VERSION);
    void* const library = ::dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (library == nullptr) {
      // "NAME: cannot open shared object file: …", or what is wrong with a file of that name
      const std::string why = ::dlerror();
      const bool is_missing = why.ends_with("No such file or directory");
      fail_to_load(why, is_missing ? "install it (Debian's libssl3 or libssl3t64)"
                                   : "install it again, or mend LD_LIBRARY_PATH");
    }
    return library;
  }

  void* library_ = load();
  decltype(::OPENSSL_init_ssl)* OPENSSL_init_ssl = symbol("OPENSSL_init_ssl");
  decltype(::BIO_new)* BIO_new = symbol("BIO_new");
  decltype(::BIO_read)* BIO_read = symbol("BIO_read");
  decltype(::BIO_s_mem)* BIO_s_mem = symbol("BIO_s_mem");
  decltype(::BIO_write)* BIO_write = symbol("BIO_write");
  decltype(::ERR_clear_error)* ERR_clear_error = symbol("ERR_clear_error");
  decltype(::SSL_CTX_ctrl)* SSL_CTX_ctrl = symbol("SSL_CTX_ctrl");
  decltype(::SSL_CTX_new)* SSL_CTX_new = symbol("SSL_CTX_new");
  decltype(::SSL_CTX_set_ciphersuites)* SSL_CTX_set_ciphersuites =
      symbol("SSL_CTX_set_ciphersuites");
  decltype(::SSL_CTX_set_num_tickets)* SSL_CTX_set_num_tickets = symbol("SSL_CTX_set_num_tickets");
  decltype(::SSL_CTX_set_psk_client_callback)* SSL_CTX_set_psk_client_callback =
      symbol("SSL_CTX_set_psk_client_callback");
  decltype(::SSL_CTX_set_psk_server_callback)* SSL_CTX_set_psk_server_callback =
      symbol("SSL_CTX_set_psk_server_callback");
  decltype(::SSL_do_handshake)* SSL_do_handshake = symbol("SSL_do_handshake");
  decltype(::SSL_free)* SSL_free = symbol("SSL_free");
  decltype(::SSL_get_error)* SSL_get_error = symbol("SSL_get_error");
  decltype(::SSL_get_ex_data)* SSL_get_ex_data = symbol("SSL_get_ex_data");
  decltype(::SSL_new)* SSL_new = symbol("SSL_new");
  decltype(::SSL_read)* SSL_read = symbol("SSL_read");
  decltype(::SSL_set_accept_state)* SSL_set_accept_state = symbol("SSL_set_accept_state");
  decltype(::SSL_set_bio)* SSL_set_bio = symbol("SSL_set_bio");
  decltype(::SSL_set_connect_state)* SSL_set_connect_state = symbol("SSL_set_connect_state");
  decltype(::SSL_set_ex_data)* SSL_set_ex_data = symbol("SSL_set_ex_data");
  decltype(::SSL_set_verify)* SSL_set_verify = symbol("SSL_set_verify");
  decltype(::SSL_write)* SSL_write = symbol("SSL_write");
  decltype(::TLS_method)* TLS_method = symbol("TLS_method");

  SSL_CTX* const context = make_context();

  // Lives until the process ends.
  SSL_CTX* make_context() const {
    // One node's openssl.cnf that forbids this version or cipher would look like a damaged link.
    OPENSSL_init_ssl(OPENSSL_INIT_NO_LOAD_CONFIG, nullptr);
    SSL_CTX* const made = SSL_CTX_new(TLS_method());
    const bool is_ready =
        made != nullptr &&
        SSL_CTX_ctrl(made, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, nullptr) == 1 &&
        // The key callbacks below imply SHA-256.
        SSL_CTX_set_ciphersuites(made, "TLS_AES_128_GCM_SHA256") == 1 &&
        SSL_CTX_set_num_tickets(made, 0) == 1;  // sessions are not resumed
    if (!is_ready) fail_to_load("it has no TLS 1.3 or no AES-128-GCM", "install another");
    SSL_CTX_ctrl(made, SSL_CTRL_MODE, SSL_MODE_RELEASE_BUFFERS, nullptr);
    SSL_CTX_set_psk_client_callback(
        made, [](SSL* tls, const char*, char* identity, unsigned identity_size, unsigned char* key,
                 unsigned key_size) {
          std::snprintf(identity, identity_size, "syncbn");
          return copy_key(tls, key, key_size);
        });
    SSL_CTX_set_psk_server_callback(made, [](SSL* tls, const char*, unsigned char* key,
                                             unsigned size) { return copy_key(tls, key, size); });
    return made;
  }

  // Returns its size, or 0 if it is too large.
  static unsigned copy_key(SSL* tls, unsigned char* to, unsigned size) {
    const auto& key = *static_cast<const std::string*>(get().SSL_get_ex_data(tls, 0));
    if (key.size() > size) return 0;
    return static_cast<unsigned>(key.copy(reinterpret_cast<char*>(to), size));
  }
};

class TlsLink : public base::LinkProtection {
 public:
  TlsLink(bool is_client, std::string key) : key_(std::move(key)) {
    if (!tls_ || in_ == nullptr || out_ == nullptr) throw std::bad_alloc();
    ssl_.SSL_set_bio(tls_.get(), in_, out_);  // owns them
    ssl_.SSL_set_ex_data(tls_.get(), 0, &key_);
    if (is_client) {
      ssl_.SSL_set_connect_state(tls_.get());
      // With no trusted authority, the client refuses a server that sends a certificate instead of
      // using the key.
      ssl_.SSL_set_verify(tls_.get(), SSL_VERIFY_PEER, nullptr);
    } else {
      ssl_.SSL_set_accept_state(tls_.get());
    }
  }

  void send(base::Channel& channel, std::string_view line) override {
    unsent_.append(line).push_back('\n');
    transfer(channel);
  }

  std::optional<std::string> next_line(base::Channel& channel, size_t max_size) override {
    const std::string_view input = channel.input();
    ssl_.BIO_write(in_, input.data(), static_cast<int>(input.size()));
    channel.consume(input.size());
    transfer(channel);
    auto line = received_.next_line();
    if (!line && received_.size() > max_size) channel.fail(EMSGSIZE);
    return line;
  }

 private:
  struct Free {
    void operator()(SSL* tls) const { OpenSsl::get().SSL_free(tls); }
  };

  // Decrypts what has arrived, and sends what is ready: records of the handshake and, after it,
  // those of `unsent_`.
  void transfer(base::Channel& channel) {
    std::array<char, 16384> buffer;  // as large as a record
    ssl_.ERR_clear_error();          // SSL_get_error() reads that queue
    int result = ssl_.SSL_do_handshake(tls_.get());
    if (result == 1 && !unsent_.empty()) {
      result = ssl_.SSL_write(tls_.get(), unsent_.data(), static_cast<int>(unsent_.size()));
      unsent_.clear();
    }
    while (result > 0) {
      result = ssl_.SSL_read(tls_.get(), buffer.data(), static_cast<int>(buffer.size()));
      if (result > 0) received_.append({buffer.data(), static_cast<size_t>(result)});
    }
    const bool failed = ssl_.SSL_get_error(tls_.get(), result) != SSL_ERROR_WANT_READ;
    for (int size = 0; (size = ssl_.BIO_read(out_, buffer.data(), buffer.size())) > 0;) {
      channel.queue({buffer.data(), static_cast<size_t>(size)});
    }
    channel.flush();
    if (failed) channel.fail(EBADMSG);  // after the alert that says so to the other end
  }

  const OpenSsl& ssl_ = OpenSsl::get();
  std::string key_;
  const std::unique_ptr<SSL, Free> tls_{ssl_.SSL_new(ssl_.context)};
  BIO* const in_ = ssl_.BIO_new(ssl_.BIO_s_mem());
  BIO* const out_ = ssl_.BIO_new(ssl_.BIO_s_mem());
  std::string unsent_;  ///< lines that wait for the end of the handshake
  base::ByteQueue received_;
};

}  // namespace

void load_tls() {
  OpenSsl::get();
}

std::unique_ptr<base::LinkProtection> make_tls_link(bool is_client, std::string key) {
  return std::make_unique<TlsLink>(is_client, std::move(key));
}

}  // namespace syncbn::launch

#else

namespace syncbn::launch {

void load_tls() {
  throw base::UserError(
      "--tls: this syncbn-launch was built without OpenSSL; build it where libssl-dev is "
      "installed, or leave --tls out");
}

std::unique_ptr<base::LinkProtection> make_tls_link(bool /*is_client*/, std::string /*key*/) {
  load_tls();
  return nullptr;
}

}  // namespace syncbn::launch

#endif
