#pragma once

#include <memory>
#include <string>

#include <syncbn/base/link_protection.h>

namespace syncbn::launch {

/// Loads OpenSSL, which make_tls_link() needs.
/// @throws base::UserError if this launcher was built without it, or it is not installed.
void load_tls();

/// Protects a link by TLS 1.3 with a pre-shared key instead of certificates, and a Diffie-Hellman
/// exchange: a key that leaks later does not decrypt recorded traffic.
/// @param key 32 bytes that both ends know, for this connection only.
std::unique_ptr<base::LinkProtection> make_tls_link(bool is_client, std::string key);

}  // namespace syncbn::launch
