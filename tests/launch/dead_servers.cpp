// A preloaded library that stands in for servers that do not answer: the name server, and the file
// server of each file named dead.jsonl. A query waits forever, after creating the file
// DEAD_SERVERS_TRACE.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string_view>

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

extern "C" int open(const char* path, int flags, ...) {
  if (std::string_view(path).ends_with("/dead.jsonl")) wait_for_ever();
  std::va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = va_arg(arguments, mode_t);  // used only if a file is created
  va_end(arguments);
  return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}
