// A preloaded library that slows down and limits starts, and shortens sleeps. Each fork() of a
// process and its children takes SLOW_STARTS_MS milliseconds longer than the one before, and forks
// after the first SLOW_STARTS_FORKS fail; pthread_create() fails after SLOW_STARTS_THREADS calls.
// This replaces `ulimit -u`, which does not limit root. The child of fork number
// SLOW_STARTS_KILLED, counted from 0, is killed at once. The first SLOW_STARTS_LISTENS calls of
// listen() on an Internet socket fail, as if another process called it at the same moment.
// nanosleep() takes SLOW_STARTS_MOST_SLEEP_MS milliseconds at most.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>

namespace {

std::atomic<int> forks = 0;
std::atomic<int> threads = 0;
std::atomic<int> listens = 0;

int number(const char* variable, int otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}

bool is_refused(int calls, const char* variable) {
  const int allowed = number(variable, -1);
  return allowed >= 0 && calls >= allowed;
}

}  // namespace

extern "C" pid_t fork() {
  const int before = forks++;
  ::usleep(static_cast<useconds_t>(before * number("SLOW_STARTS_MS", 0)) * 1000);
  if (is_refused(before, "SLOW_STARTS_FORKS")) {
    errno = EAGAIN;
    return -1;
  }
  static const auto real = reinterpret_cast<pid_t (*)()>(::dlsym(RTLD_NEXT, "fork"));
  const pid_t child = real();
  if (child == 0 && before == number("SLOW_STARTS_KILLED", -1)) ::raise(SIGKILL);
  return child;
}

extern "C" int listen(int socket, int backlog) {
  int domain = 0;
  socklen_t size = sizeof(domain);
  ::getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &size);
  if (domain != AF_UNIX && listens++ < number("SLOW_STARTS_LISTENS", 0)) {
    errno = EADDRINUSE;
    return -1;
  }
  static const auto real = reinterpret_cast<int (*)(int, int)>(::dlsym(RTLD_NEXT, "listen"));
  return real(socket, backlog);
}

extern "C" int nanosleep(const timespec* wanted, timespec* left) {
  static const auto real =
      reinterpret_cast<int (*)(const timespec*, timespec*)>(::dlsym(RTLD_NEXT, "nanosleep"));
  const int most = number("SLOW_STARTS_MOST_SLEEP_MS", -1);
  timespec capped = *wanted;
  if (most >= 0 && capped.tv_sec * 1000 + capped.tv_nsec / 1'000'000 >= most) {
    capped = {.tv_sec = most / 1000, .tv_nsec = most % 1000 * 1'000'000L};
  }
  return real(&capped, left);
}

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
  if (is_refused(threads++, "SLOW_STARTS_THREADS")) return EAGAIN;
  using Function = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "pthread_create"));
  return real(thread, attributes, start, argument);
}
