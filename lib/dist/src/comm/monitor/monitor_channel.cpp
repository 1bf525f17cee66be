#include "monitor/monitor_channel.h"

#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/held_port.h>
#include <syncbn/base/job_secret.h>
#include <syncbn/base/random.h>
#include <syncbn/base/sha256.h>
#include <syncbn/base/signal_mask.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace syncbn::dist::detail {
namespace {

constexpr char kStoreKey[] = "syncbn/monitor";
constexpr int kTickMilliseconds = 250;
// Time limit for a connection's hello, which ranks send at once.
constexpr std::chrono::seconds kGreetingTime(30);
// When there are too many connections without a hello, one older than this may be dropped.
constexpr std::chrono::seconds kUndisturbedTime(1);
// Upper bound on the bytes of the hello. Later messages have no bound, because a leave notice grows
// with the number of groups.
constexpr size_t kMaxGreeting = size_t{64} * 1024;
// Upper bound on connections of other programs (port scanners) that are open at the same time.
constexpr int kMaxStrangers = 64;

/// The job's secret; none without libcrypto, by which ranks prove that they know it.
const std::string& usable_secret() {
  static const auto* const secret = new std::string([] {
    try {
      if (!base::job_secret().empty()) base::load_sha256();
      return base::job_secret();
    } catch (const base::UserError&) {
      return std::string();
    }
  }());  // outlives static destructors
  return *secret;
}

/// This process's channel, for the fork() handlers.
struct Living {
  std::mutex mutex;
  MonitorChannel* channel = nullptr;
};
Living& living_channel() {
  static auto* const instance = new Living;
  return *instance;
}

}  // namespace

std::string Message::line() const {
  std::string text = fmt::format("{}\t{}\t{}", from, to, type);
  for (std::string field : fields) {
    std::replace_if(
        field.begin(), field.end(), [](unsigned char c) { return c < ' '; }, ' ');
    text += '\t' + field;
  }
  return text;
}

std::optional<Message> Message::parse(const std::string& line) {
  const auto is_control = [](unsigned char c) { return c < ' ' && c != '\t'; };
  if (std::ranges::any_of(line, is_control)) return std::nullopt;
  std::vector<std::string> parts;
  for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = line.find('\t', begin);
    parts.push_back(line.substr(begin, end - begin));
  }
  if (parts.size() < 3) return std::nullopt;
  const auto from = base::parse_number<int>(parts[0]);
  const auto to = base::parse_number<int>(parts[1]);
  if (!from || !to) return std::nullopt;
  return Message{*from, *to, parts[2], {parts.begin() + 3, parts.end()}};
}

uint64_t Message::number(size_t index) const {
  return base::parse_number<uint64_t>(field(index)).value_or(0);
}

MonitorLink::MonitorLink(base::UniqueFd fd, base::Handshake::Side side, int peer_rank,
                         std::string peer_where)
    : channel(std::move(fd)),
      handshake(side,
                {.greeting = "syncbn-monitor 1",
                 .client = "rank",
                 .server = "rank 0",
                 .secret = "secret",
                 .source = base::kSecretDescriptor},
                usable_secret()),
      peer(peer_rank),
      where(std::move(peer_where)) {
  base::detect_lost_host(channel.fd());
}

bool MonitorLink::shake_hands() {
  if (handshake.is_done()) return true;
  if (handshake.advance(channel)) protection = handshake.protection();
  return handshake.is_done();
}

void MonitorLink::send(const std::string& line) {
  protection ? protection->send(channel, line) : channel.send(line + "\n");
}

std::optional<std::string> MonitorLink::next_line(size_t max_size) {
  return protection ? protection->next_line(channel, max_size) : channel.next_line(max_size);
}

MonitorChannel::MonitorChannel(c10d::Store& store, int rank, int world_size,
                               const std::string& address, std::chrono::milliseconds limit)
    : rank_(rank),
      world_size_(world_size),
      where_(fmt::format("{}, process {}", base::hostname(), ::getpid())),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) base::throw_errno("cannot make an eventfd");
  if (rank_ == 0) {
    listen(store, address);
  } else {
    connect(store, limit);
  }
}

void MonitorChannel::listen(c10d::Store& store, const std::string& address) {
  std::string reason;
  const base::AddressList list = base::resolve(address, 0, reason);
  if (!list) throw base::UnavailableError(fmt::format("rank 0 cannot use {}: {}", address, reason));
  listener_ = base::listen_at(*list, SOCK_NONBLOCK);
  if (!listener_) base::throw_errno(fmt::format("rank 0 cannot listen on {}", address));
  if (usable_secret() != base::job_secret())
    spdlog::warn("without OpenSSL's libcrypto, other users of this machine could disturb the job");
  token_ = base::random_id();
  const Message place{0,
                      Message::kAll,
                      "place",
                      {address, std::to_string(base::bound_port(listener_.get())), token_, where_,
                       usable_secret().empty() ? "" : "secret"}};
  const std::string line = place.line();
  store.set(kStoreKey, std::vector<uint8_t>(line.begin(), line.end()));
}

void MonitorChannel::connect(c10d::Store& store, std::chrono::milliseconds limit) {
  try {
    store.wait({kStoreKey}, limit);
  } catch (const c10::Error& error) {
    throw base::UnavailableError(fmt::format(
        "rank {} of {} on {}: rank 0 arrived and then did not listen for the other ranks: {}; see "
        "the messages of rank 0",
        rank_, world_size_, base::hostname(), error.what_without_backtrace()));
  }
  const std::vector<uint8_t> bytes = store.get(kStoreKey);
  const auto place = Message::parse({bytes.begin(), bytes.end()});
  if (!place) throw base::InternalError("rank 0 left an address that cannot be read in the store");
  if (!place->field(4).empty() && base::job_secret().empty()) {
    throw base::UserError(fmt::format(
        "rank {} of {} on {} did not inherit the secret that its launcher has passed to rank 0 "
        "({}); what starts the rank must not close descriptors",
        rank_, world_size_, base::hostname(), base::kSecretDescriptor));
  }
  if (!place->field(4).empty()) base::load_sha256();  // throws here, not in the thread
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::string reason;
  const int port = static_cast<int>(place->number(1));
  const auto fail = [&] {
    throw base::UnavailableError(
        fmt::format("rank {} of {} on {} cannot connect to rank 0 ({}) at {}:{}: {}", rank_,
                    world_size_, base::hostname(), place->field(3), place->field(0), port, reason));
  };
  const base::AddressList list = base::resolve(place->field(0), port, reason);
  base::UniqueFd fd = base::connect_to_any(list.get(), deadline, reason);
  if (!fd) fail();
  MonitorLink& link =
      links_.emplace_back(std::move(fd), base::Handshake::Side::kClient, 0, place->field(3));
  link.channel.send(link.handshake.begin());
  while (!link.shake_hands()) {
    reason = link.handshake.failure();
    if (reason.empty() && link.channel.has_ended()) reason = "it closed the connection";
    if (reason.empty() && !base::poll_until(link.channel.fd(), POLLIN, deadline)) {
      reason = "it does not answer";
    }
    if (!reason.empty()) fail();
    link.channel.receive();
  }
  link.send(Message{rank_, 0, "hello", {place->field(2), where_}}.line());
}

void MonitorChannel::start(Events events) {
  events_ = std::move(events);
  follow_forks();
  const base::SignalMask blocked;  // which the thread inherits
  thread_ = std::thread([this] { run(); });
}

MonitorChannel::~MonitorChannel() {
  {
    const std::lock_guard lock(living_channel().mutex);
    if (living_channel().channel == this) living_channel().channel = nullptr;
  }
  if (is_copy_) {
    thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  ::eventfd_write(wake_.get(), 1);
  if (thread_.joinable()) thread_.join();
}

/// A child forked without exec (a loader's worker) must not keep the connections open, because they
/// have to end with this process.
void MonitorChannel::follow_forks() {
  const std::lock_guard lock(living_channel().mutex);
  living_channel().channel = this;
  static const int once = ::pthread_atfork(
      [] {
        living_channel().mutex.lock();
        if (living_channel().channel != nullptr) living_channel().channel->mutex_.lock();
      },
      [] {
        if (living_channel().channel != nullptr) living_channel().channel->mutex_.unlock();
        living_channel().mutex.unlock();
      },
      [] {
        MonitorChannel* const channel = std::exchange(living_channel().channel, nullptr);
        if (channel != nullptr) {
          channel->close_in_child();
          channel->mutex_.unlock();
        }
        living_channel().mutex.unlock();
      });
  if (once != 0) throw base::InternalError("pthread_atfork failed");
}

void MonitorChannel::close_in_child() {
  is_copy_ = true;
  for (MonitorLink& link : links_) link.channel.close();
  listener_.reset();
  wake_.reset();
}

void MonitorChannel::post(int to, const std::string& type, std::vector<std::string> fields) {
  const std::lock_guard lock(mutex_);
  send({rank_, to, type, std::move(fields)});
}

void MonitorChannel::flush(std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (;;) {
    std::vector<pollfd> polls;
    {
      const std::lock_guard lock(mutex_);
      for (MonitorLink& link : links_) {
        link.channel.flush();
        if (link.channel.unsent() > 0) polls.push_back({link.channel.fd(), POLLOUT, 0});
      }
    }
    if (polls.empty() || std::chrono::steady_clock::now() >= deadline) return;
    ::poll(polls.data(), polls.size(), base::milliseconds_until(deadline));
  }
}

/// Rank 0 sends to the receivers; other ranks send everything to rank 0.
void MonitorChannel::send(const Message& message) {
  const std::string line = message.line();
  for (MonitorLink& link : links_) {
    const bool is_for_peer = message.to == Message::kAll || message.to == link.peer || rank_ != 0;
    if (!is_for_peer || link.peer < 0 || link.peer == message.from) continue;
    link.send(line);
    if (link.channel.unsent() > 0) ::eventfd_write(wake_.get(), 1);
  }
}

void MonitorChannel::run() {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kTick(kTickMilliseconds);
  Clock::time_point next_tick = Clock::now() + kTick;
  for (;;) {
    wait_for_events();
    std::vector<Message> messages;
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return;
      messages = read_links();
      accept_links();  // after reading: it may drop a connection without a hello
    }
    for (const Message& message : messages) dispatch(message);
    if (Clock::now() < next_tick) continue;
    events_.tick();
    next_tick = Clock::now() + kTick;
  }
}

void MonitorChannel::wait_for_events() {
  std::vector<pollfd> polls{{wake_.get(), POLLIN, 0}};
  {
    const std::lock_guard lock(mutex_);
    if (listener_ && may_accept_) polls.push_back({listener_.get(), POLLIN, 0});
    for (const MonitorLink& link : links_) {
      polls.push_back({link.channel.fd(), link.channel.events(), 0});
    }
  }
  ::poll(polls.data(), polls.size(), kTickMilliseconds);
  eventfd_t ignored = 0;
  ::eventfd_read(wake_.get(), &ignored);
  const std::lock_guard lock(mutex_);
  const size_t first = polls.size() - links_.size();
  for (size_t i = 0; i < links_.size(); ++i) links_[i].is_ready = polls[first + i].revents != 0;
}

/// Without a free file descriptor, poll() would return at once for the listener: leave that out
/// until the next tick.
void MonitorChannel::accept_links() {
  if (!listener_) return;
  const auto is_unknown = [](const MonitorLink& link) { return link.peer < 0; };
  const auto most = world_size_ + kMaxStrangers;
  for (auto unknown = std::ranges::count_if(links_, is_unknown);; ++unknown) {
    const auto oldest = unknown < most ? links_.end() : std::ranges::find_if(links_, is_unknown);
    const bool is_full = oldest != links_.end();
    may_accept_ = !is_full || std::chrono::steady_clock::now() - oldest->since > kUndisturbedTime;
    if (!may_accept_) return;
    base::UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!fd) {
      may_accept_ = errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
      return;
    }
    if (is_full) {
      links_.erase(oldest);
      --unknown;
    }
    links_.emplace_back(std::move(fd), base::Handshake::Side::kServer);
  }
}

void MonitorChannel::drop_strangers() {
  const bool all_have_arrived = arrived_ == world_size_ - 1;
  if (all_have_arrived) listener_.reset();
  const auto too_old = std::chrono::steady_clock::now() - kGreetingTime;
  for (MonitorLink& link : links_) {
    if (link.peer < 0 && (all_have_arrived || link.since < too_old)) link.channel.close();
  }
}

/// Returns the messages received, and an "end" message from each rank that has ended.
std::vector<Message> MonitorChannel::read_links() {
  std::vector<Message> messages;
  for (MonitorLink& link : links_) {
    if (!link.is_ready) continue;
    link.channel.flush();
    link.channel.receive();
    while (link.channel.is_open()) {
      if (!link.shake_hands()) {
        if (!link.handshake.failure().empty()) refuse(link);
        break;
      }
      const auto line = link.next_line(link.peer < 0 ? kMaxGreeting : SIZE_MAX);
      if (!line) break;
      const auto message = Message::parse(*line);
      if (link.peer < 0) {
        greet(link, message);
      } else if (message && (rank_ != 0 || message->from == link.peer)) {
        messages.push_back(*message);
      }
    }
    if (!link.channel.has_ended()) continue;
    link.channel.close();
    if (link.channel.error() == EBADMSG) {
      spdlog::warn("a message to the peer monitor from rank {} was damaged or not its own",
                   link.peer);
    }
    if (link.peer >= 0) messages.push_back({link.peer, Message::kAll, "end", {link.where}});
  }
  drop_strangers();
  std::erase_if(links_, [](const MonitorLink& link) { return !link.channel.is_open(); });
  return messages;
}

void MonitorChannel::refuse(MonitorLink& link) {
  if (!usable_secret().empty() && !std::exchange(has_refused_, true)) {
    spdlog::warn("rank 0 refused a connection from {} to its peer monitor: {} (said once)",
                 base::peer_address(link.channel.fd()), link.handshake.failure());
  }
  link.channel.close();
}

void MonitorChannel::greet(MonitorLink& link, const std::optional<Message>& hello) {
  const bool is_awaited =
      hello && hello->type == "hello" && hello->field(0) == token_ && 0 < hello->from &&
      hello->from < world_size_ &&
      std::ranges::none_of(links_, [&](const MonitorLink& one) { return one.peer == hello->from; });
  if (!is_awaited) return link.channel.close();
  link.peer = hello->from;
  link.where = hello->field(1);
  ++arrived_;
}

void MonitorChannel::dispatch(const Message& message) {
  if (rank_ == 0 && message.to != 0) {
    const std::lock_guard lock(mutex_);
    send(message);
  }
  if (message.to != Message::kAll && message.to != rank_) return;
  if (message.type == "end") {
    events_.end(message.from, message.field(0));
  } else {
    events_.message(message);
  }
}

}  // namespace syncbn::dist::detail
