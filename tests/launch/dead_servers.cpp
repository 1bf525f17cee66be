// A preloaded library that stands in for a name server that does not answer. A query waits forever,
// after creating the file DEAD_SERVERS_TRACE.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace {

[[noreturn]] void wait_for_ever() {
  if (std::FILE* file = std::fopen(std::getenv("DEAD_SERVERS_TRACE"), "w")) std::fclose(file);
  for (;;) ::pause();
}

}  // namespace

extern "C" int getaddrinfo(const char* name, const char* service, const addrinfo* hints,
                           addrinfo** found) {
  in_addr numeric{};
  if (name != nullptr && ::inet_aton(name, &numeric) == 0) wait_for_ever();
  static const auto real =
      reinterpret_cast<decltype(&::getaddrinfo)>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  return real(name, service, hints, found);
}
