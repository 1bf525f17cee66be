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

/// Thrown in a stage that waits for a stage that has failed.
struct StageAbandoned {};

/// A message from a stage to a neighbour for one micro-batch. It carries the tensors' requires_grad
/// flags, but not their graph.
struct StageMessage {
  std::vector<at::Tensor> tensors;
  int64_t samples = 0;      ///< of the micro-batch
  bool is_training = true;  ///< a backward follows
};

/// A copy on `device`, or the tensor itself. Only a copy between GPUs may be in flight on return:
/// readers on the CPU do not wait for a stream.
inline at::Tensor to_stage(const at::Tensor& tensor, at::Device device) {
  return tensor.to(device, /*non_blocking=*/device.is_cuda() && tensor.is_cuda());
}

/// One direction between two stages.
class Transfer {
 public:
  Transfer() = default;
  virtual ~Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  /// Never waits for the other stage.
  virtual void send(const StageMessage& message) = 0;
  /// The next message, with its tensors on `device`.
  /// @throws StageAbandoned if the sender has failed
  virtual StageMessage receive(at::Device device) = 0;
  /// Sends a notice of this stage's failure in place of a message. Never waits.
  virtual void fail() = 0;

  /// Starts to receive tensors like these, which receive() returns later.
  virtual void expect(const std::vector<at::Tensor>& /*like*/) {}
  /// Waits until all messages but the latest `kept` have arrived, and frees their tensors.
  virtual void release(size_t /*kept*/) {}
};

/// A transfer between threads.
class QueueTransfer : public Transfer {
 public:
  void send(const StageMessage& message) override;
  StageMessage receive(at::Device device) override;
  void fail() override;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<StageMessage> waiting_;
  bool has_failed_ = false;
};

/// A transfer between ranks. A header on the CPU, with types and sizes, precedes the tensors of
/// each message.
class RankTransfer : public Transfer {
 public:
  RankTransfer(ProcessGroupPtr group, int peer, int tag, Timeout timeout)
      : group_(std::move(group)), peer_(peer), tag_(tag), timeout_(timeout) {}

  void send(const StageMessage& message) override;
  StageMessage receive(at::Device device) override;
  void fail() override;
  void expect(const std::vector<at::Tensor>& like) override;
  void release(size_t kept) override;

  /// The number of messages and notices that were sent.
  int64_t sent() const { return sent_; }
  /// Receives and drops the rest of the `sent` messages and notices that the peer has sent.
  void discard(int64_t sent, at::Device device);

 private:
  /// Tensors in flight.
  struct Pending {
    std::vector<at::Tensor> tensors;
    std::vector<WorkPtr> works;
  };
  void start_receiving(Pending& pending);
  Pending& send_header(const at::Tensor& header);

  const ProcessGroupPtr group_;
  const int peer_;
  const int tag_;
  const Timeout timeout_;
  std::deque<Pending> sending_, expected_;
  int64_t sent_ = 0;
  int64_t received_ = 0;
};

}  // namespace syncbn::dist::detail
