#pragma once

#include <memory>
#include <string>

#include <syncbn/base/link_protection.h>

namespace syncbn::launch {

/// Loads OpenSSL, which make_tls_link() needs.
/// @throws base::UserError if this launcher was built without it, or it is not installed.
void load_tls();

/// Protects a link by TLS 1.3 with a pre-shared key in place of certificates, and a Diffie-Hellman
/// exchange: who learns the key later cannot read what was recorded.
/// @param key 32 bytes that both ends know, of this connection only.
std::unique_ptr<base::LinkProtection> make_tls_link(bool is_client, std::string key);

}  // namespace syncbn::launch
