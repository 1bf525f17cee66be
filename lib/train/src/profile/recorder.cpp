#include "profile/recorder.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/process_group.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/profiler/collection.h>

#include <algorithm>
#include <array>
#include <exception>
#include <fstream>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "profile/intervals.h"
#include "profile/phases.h"

namespace syncbn::train {
namespace {

namespace kineto = torch::profiler::impl;
using TorchOp = kineto::ExtraFields<kineto::EventType::TorchOp>;

constexpr std::string_view kNodePrefix = "autograd::engine::evaluate_function: ";
constexpr std::string_view kStatisticsPrefix = "SyncBatchNorm";

std::set<kineto::ActivityType> activities() {
  std::set<kineto::ActivityType> all{kineto::ActivityType::CPU};
  if (dist::device().is_cuda()) all.insert(kineto::ActivityType::CUDA);
  return all;
}

/// "layer1.0.conv1" for "layer1.0.conv1.weight".
std::string layer_of(const std::string& tensor) {
  const size_t dot = tensor.rfind('.');
  return dot == std::string::npos ? tensor : tensor.substr(0, dot);
}

/// Writes a file by libtorch, which reports no errors. Its last byte shows whether it is whole.
void save_trace(torch::autograd::profiler::ProfilerResult& result,
                const std::filesystem::path& to) {
  base::write_file_atomically(to, [&](const std::filesystem::path& file) {
    result.save(file);
    std::ifstream written(file, std::ios::binary);
    written.seekg(-2, std::ios::end);
    std::array<char, 2> end{};  // perhaps with a newline
    written.read(end.data(), end.size());
    if (std::ranges::find(end, '}') != end.end()) return;
    throw base::UnavailableError(fmt::format(
        "cannot write {}: libtorch's profiler has not written all of it; is the disk full?",
        to.string()));
  });
}

}  // namespace

/// Reads the events that were recorded between start() and stop().
class Recorder::Reader {
 public:
  Reader(Recorder& recorder, std::vector<dist::TracedCall> calls)
      : recorder_(recorder), calls_(std::move(calls)) {}

  void read(const std::vector<std::shared_ptr<kineto::Result>>& roots) {
    for (const auto& root : roots) read(*root, {});
    const Intervals statistics = add_exchanges();
    add_layers(statistics);
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;

  /// Work for a layer: an operator of its forward, or a node of its backward.
  struct Work {
    std::string layer;
    bool is_backward = false;
    Interval time;
    int64_t on_gpu = 0;  ///< time of its kernels
  };

  /// What contains an event.
  struct Inside {
    bool forward = false;
    bool node = false;  ///< of the autograd graph
    size_t work = kNone;
    int64_t since = 0;  ///< when the innermost operator began
  };

  void read(const kineto::Result& event, Inside inside) {
    const Interval time{event.start_time_ns_, event.endTimeNS()};
    if (event.tag() == kineto::EventType::TorchOp) {
      // An event that had not ended at stop() has no end.
      if (time.end < time.begin) return;
      read(event, std::get<TorchOp>(event.extra_fields_), time, inside);
    } else if (event.deviceType() == at::kCUDA) {
      read_kernel(event, time, inside);
    }
    for (const auto& child : event.children_) read(*child, inside);
  }

  void read(const kineto::Result& event, const TorchOp& fields, Interval time, Inside& inside) {
    const std::string& name = fields.name_;
    inside.since = time.begin;
    if (fields.scope_ == at::RecordScope::USER_SCOPE) {
      if (name == kForwardPhase) inside.forward = true;
      if (event.start_tid_ == thread_ && name == kBackwardPhase) backwards_.push_back(time);
    } else if (name.starts_with(kNodePrefix)) {
      read_node(fields, time, inside);
    } else if (fields.scope_ == at::RecordScope::FUNCTION) {
      read_operator(event, fields, time, inside);
    }
  }

  void read_node(const TorchOp& fields, Interval time, Inside& inside) {
    inside.node = true;
    nodes_.push_back(time);
    if (inside.work != kNone) return;
    const auto made_by = makers_.find({fields.forward_tid_, fields.sequence_number_});
    if (made_by == makers_.end() || made_by->second.empty()) return;
    inside.work = works_.size();
    works_.push_back({.layer = made_by->second, .is_backward = true, .time = time});
  }

  void read_operator(const kineto::Result& event, const TorchOp& fields, Interval time,
                     Inside& inside) {
    // Layers whose results were not kept run again inside a node (activation checkpointing).
    if (inside.work == kNone && (inside.forward || inside.node)) {
      std::string layer = layer_of(fields);
      if (layer.empty() && inside.forward && !fields.name_.starts_with("c10d::")) {
        layer = fields.name_;
      }
      if (!layer.empty()) {
        inside.work = works_.size();
        works_.push_back({.layer = std::move(layer), .time = time});
      }
    }
    // An autograd node has the sequence number that its operator saw. If an operator makes no node,
    // the next ones see the same number, and the last one counts.
    if (fields.sequence_number_ < 0) return;
    makers_[{event.start_tid_, fields.sequence_number_}] =
        inside.work == kNone ? "" : works_[inside.work].layer;
  }

  std::string layer_of(const TorchOp& fields) const {
    for (const kineto::op_input_t& input : fields.inputs_) {
      const auto* const tensor = std::get_if<kineto::TensorMetadata>(&input);
      if (tensor == nullptr) continue;
      const auto name = recorder_.names_.find(tensor->impl().value_of());
      if (name != recorder_.names_.end()) return name->second;
    }
    return "";
  }

  void read_kernel(const kineto::Result& event, Interval time, const Inside& inside) {
    if (event.name().starts_with("nccl")) {
      exchanging_.push_back({inside.since, time});
      return;
    }
    kernels_.push_back(time);
    if (inside.work != kNone) works_[inside.work].on_gpu += time.end - time.begin;
  }

  /// The times in which nothing is computed: on GPUs, between kernels; on CPUs, in a backward after
  /// its last node, where the Reducer waits for the gradients.
  Intervals idle() const {
    if (!kernels_.empty()) {
      const Intervals busy = united(kernels_);
      return without({{busy.front().begin, busy.back().end}}, busy);
    }
    Intervals tails;
    for (const Interval& backward : backwards_) {
      int64_t last = backward.begin;
      for (const Interval& node : nodes_) {
        if (node.end <= backward.end) last = std::max(last, node.end);
      }
      tails.push_back({last, backward.end});
    }
    return united(std::move(tails));
  }

  /// Returns the times of the exchanges of statistics.
  Intervals add_exchanges() {
    const Intervals idle = this->idle();
    Intervals gradients;
    Intervals statistics;
    Intervals blocked;
    for (const dist::TracedCall& call : calls_) {
      if (call.peer >= 0) continue;
      Interval time{call.begin, call.end};
      if (!kernels_.empty()) time = time_on_gpu(time);
      if (call.name.starts_with(kStatisticsPrefix)) {
        statistics.push_back(time);
      } else if (is_in_backward(call.begin) && call.name == "all_reduce") {
        gradients.push_back(time);  // one of the Reducer's buckets
      }
      const bool has_waiter = call.waited_from >= 0 && kernels_.empty();
      const Intervals waits =
          has_waiter ? Intervals{{call.waited_from, call.end}} : common({time}, idle);
      blocked.insert(blocked.end(), waits.begin(), waits.end());
    }
    const auto add = [&](const Intervals& exchanges, ExchangeTime& sum) {
      const ExchangeTime time = exchange_time(exchanges, blocked);
      sum.total += time.total;
      sum.exposed += time.exposed;
    };
    add(gradients, recorder_.profile_.gradients);
    add(statistics, recorder_.profile_.statistics);
    return united(std::move(statistics));
  }

  bool is_in_backward(int64_t time) const {
    return std::ranges::any_of(backwards_, [time](const Interval& backward) {
      return backward.begin <= time && time < backward.end;
    });
  }

  /// The time of the NCCL kernels that a call has queued.
  Interval time_on_gpu(Interval call) const {
    Interval time = call;
    for (const auto& [queued, kernel] : exchanging_) {
      if (queued < call.begin || queued >= call.end) continue;
      time = time == call
                 ? kernel
                 : Interval{std::min(time.begin, kernel.begin), std::max(time.end, kernel.end)};
    }
    return time;
  }

  /// @param statistics the times of their exchanges
  void add_layers(const Intervals& statistics) {
    for (Work& work : works_) {
      const auto layer = std::ranges::find(recorder_.profile_.layers, work.layer, &LayerTime::name);
      LayerTime& sum = layer != recorder_.profile_.layers.end()
                           ? *layer
                           : recorder_.profile_.layers.emplace_back(LayerTime{.name = work.layer});
      // Only exchanges that may lie inside.
      const auto first = std::ranges::lower_bound(statistics, work.time.begin, {}, &Interval::end);
      const auto last =
          std::ranges::lower_bound(first, statistics.end(), work.time.end, {}, &Interval::begin);
      const int64_t exchange = length_of(common({work.time}, {first, last}));
      const int64_t whole = work.time.end - work.time.begin;
      (work.is_backward ? sum.backward : sum.forward) +=
          kernels_.empty() ? whole - exchange : work.on_gpu;
      sum.exchange += exchange;
    }
  }

  Recorder& recorder_;
  std::vector<dist::TracedCall> calls_;
  const uint64_t thread_ = at::RecordFunction::currentThreadId();
  /// The layer that made an autograd node, by the thread of its operator and the sequence
  /// number; empty: none.
  std::map<std::pair<uint64_t, int64_t>, std::string> makers_;
  std::vector<Work> works_;
  std::vector<Interval> backwards_;
  std::vector<Interval> nodes_;
  std::vector<Interval> kernels_;                         ///< except NCCL's
  std::vector<std::pair<int64_t, Interval>> exchanging_;  ///< NCCL's, with the time of the launch
};

Recorder::Recorder(const models::Model& model) {
  for (const auto& list : {model.named_parameters(), model.named_buffers()}) {
    for (const auto& item : list) {
      names_[item.value().unsafeGetTensorImpl()] = layer_of(item.key());
    }
  }
}

Recorder::~Recorder() {
  if (has_profiler_) torch::autograd::profiler::disableProfiler();
}

void Recorder::start(int64_t step) {
  first_step_ = step;
  if (!is_refused_) start_profiler();
  calls_ = std::make_unique<dist::CallTrace>();
}

void Recorder::start_profiler() {
  kineto::ExperimentalConfig experimental;
  experimental.profile_all_threads = true;
  const kineto::ProfilerConfig config(
      kineto::ProfilerState::KINETO, /*report_input_shapes=*/true, /*profile_memory=*/false,
      /*with_stack=*/false, /*with_flops=*/false, /*with_modules=*/false, experimental);
  try {
    torch::autograd::profiler::prepareProfiler(config, activities());
    torch::autograd::profiler::enableProfiler(
        config, activities(),
        {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION,
         at::RecordScope::USER_SCOPE});
    has_profiler_ = true;
  } catch (const std::exception& error) {  // a driver may refuse CUPTI
    is_refused_ = true;
    spdlog::warn("libtorch's profiler does not start, so the profile has only exchanges: {}",
                 error.what());
  }
}

void Recorder::stop() {
  Reader reader(*this, calls_->take());
  calls_.reset();
  if (!std::exchange(has_profiler_, false)) return reader.read({});
  auto result = torch::autograd::profiler::disableProfiler();
  reader.read(result->event_tree());
  traces_.push_back({first_step_, std::move(result)});
}

void Recorder::clear() {
  traces_.clear();
  profile_ = {};
}

void Recorder::save(const ProfileFiles& files, int64_t rank) const {
  for (const auto& [first_step, result] : traces_) {
    save_trace(*result, files.trace(first_step, rank));
  }
}

void Recorder::copy_times_to(RankProfile& profile) const {
  profile.layers = profile_.layers;
  profile.gradients = profile_.gradients;
  profile.statistics = profile_.statistics;
}

}  // namespace syncbn::train
