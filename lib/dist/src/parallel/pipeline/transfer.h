#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <syncbn/dist/collectives.h>

namespace syncbn::dist::detail {

/// Thrown in a stage that waits for one that failed.
struct StageAbandoned {};

/// One direction between two stages. Tensors have no graph; whether they require a gradient arrives
/// with them.
class Transfer {
 public:
  using Tensors = std::vector<at::Tensor>;

  Transfer() = default;
  virtual ~Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  /// Never waits for the other stage.
  virtual void send(const Tensors& tensors) = 0;
  /// The next tensors, on `device`. @throws StageAbandoned if the sender has failed.
  virtual Tensors receive(at::Device device) = 0;
  /// In place of tensors: the sender has failed. Never waits.
  virtual void fail() = 0;

  /// Starts a receive() of tensors like these.
  virtual void expect(const Tensors& /*like*/) {}
  /// Lets go of what was sent but for the latest `kept`, which may not have arrived.
  virtual void release(size_t /*kept*/) {}
};

/// Between threads.
class QueueTransfer : public Transfer {
 public:
  void send(const Tensors& tensors) override;
  Tensors receive(at::Device device) override;
  void fail() override;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Tensors> waiting_;
  bool has_failed_ = false;
};

/// Between ranks. A header with types and sizes, on the CPU, precedes each message.
class RankTransfer : public Transfer {
 public:
  RankTransfer(ProcessGroupPtr group, int peer, int tag, Timeout timeout)
      : group_(std::move(group)), peer_(peer), tag_(tag), timeout_(timeout) {}

  void send(const Tensors& tensors) override;
  Tensors receive(at::Device device) override;
  void fail() override;
  void expect(const Tensors& like) override;
  void release(size_t kept) override;

 private:
  /// Tensors under way.
  struct Message {
    Tensors tensors;
    std::vector<WorkPtr> works;
  };
  void start_receiving(Message& message);
  void send_header(const at::Tensor& header, Message& message) const;

  const ProcessGroupPtr group_;
  const int peer_;
  const int tag_;
  const Timeout timeout_;
  std::deque<Message> sent_, expected_;
};

}  // namespace syncbn::dist::detail
