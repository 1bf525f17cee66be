// Stands in for a name server that does not answer: who asks for an address waits for ever. Leaves
// the file DEAD_NAMES_TRACE when asked.
#include <netdb.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

extern "C" int getaddrinfo(const char* /*name*/, const char* /*service*/, const addrinfo* /*hints*/,
                           addrinfo** /*found*/) {
  if (std::FILE* file = std::fopen(std::getenv("DEAD_NAMES_TRACE"), "w")) std::fclose(file);
  for (;;) ::pause();
}
