#include "profile/recorder.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/process_group.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/profiler/collection.h>

#include <algorithm>
#include <exception>
#include <set>
#include <string_view>
#include <utility>

#include "profile/clocks.h"
#include "profile/phases.h"

namespace syncbn::train {
namespace {

namespace kineto = torch::profiler::impl;
using TorchOp = kineto::ExtraFields<kineto::EventType::TorchOp>;

constexpr std::string_view kNodePrefix = "autograd::engine::evaluate_function: ";
constexpr std::string_view kStatisticsPrefix = "SyncBatchNorm";
constexpr const char* kTrainingTrack = "training";
constexpr const char* kLayersTrack = "layers";
constexpr const char* kExchangesTrack = "exchanges";

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

bool is_phase(const std::string& name) {
  static const std::set<std::string> phases{kLoaderPhase,   kToDevicePhase,  kForwardPhase,
                                            kBackwardPhase, kOptimizerPhase, kVotePhase};
  return phases.contains(name);
}

/// Distributes spans that overlap over tracks NAME, NAME 2, ...
std::vector<Track> in_lanes(const std::string& name, std::vector<Track::Span> spans) {
  std::ranges::stable_sort(spans, {}, [](const Track::Span& span) { return span.time.begin; });
  std::vector<Track> lanes;
  for (Track::Span& span : spans) {
    const auto free = std::ranges::find_if(
        lanes, [&](const Track& lane) { return lane.spans.back().time.end <= span.time.begin; });
    if (free != lanes.end()) {
      free->spans.push_back(std::move(span));
    } else {
      const std::string number = lanes.empty() ? "" : fmt::format(" {}", lanes.size() + 1);
      lanes.push_back({name + number, {std::move(span)}});
    }
  }
  return lanes;
}

}  // namespace

/// Reads the events that were recorded between start() and stop().
class Recorder::Reader {
 public:
  Reader(Recorder& recorder, std::vector<dist::TracedCall> calls)
      : recorder_(recorder), calls_(std::move(calls)) {}

  void read(const std::vector<std::shared_ptr<kineto::Result>>& roots) {
    for (const auto& root : roots) read(*root, {});
    add_exchanges();
    add_layers();
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
    if (time.begin < recorder_.first_) return;
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
    const bool is_of_training = event.start_tid_ == thread_;
    inside.since = time.begin;
    recorder_.spans_[is_of_training ? kTrainingTrack : fmt::format("thread {}", event.start_tid_)]
        .push_back({name, time});
    if (fields.scope_ == at::RecordScope::USER_SCOPE) {
      if (name == kForwardPhase) inside.forward = true;
      if (is_of_training && is_phase(name)) recorder_.profile_.phases.push_back({name, time});
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
    const std::string name = event.name();
    const auto& [device, stream] = event.kineto_info_;
    recorder_.spans_[fmt::format("GPU {} stream {}", device, stream)].push_back({name, time});
    if (name.starts_with("nccl")) {
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
    for (const Phase& phase : recorder_.profile_.phases) {
      if (phase.name != kBackwardPhase) continue;
      int64_t last = phase.time.begin;
      for (const Interval& node : nodes_) {
        if (node.end <= phase.time.end) last = std::max(last, node.end);
      }
      tails.push_back({last, phase.time.end});
    }
    return united(std::move(tails));
  }

  void add_exchanges() {
    std::ranges::sort(calls_, {}, &dist::TracedCall::begin);
    const Intervals idle = this->idle();
    int64_t bucket = 0;
    int64_t backward_end = 0;
    for (const dist::TracedCall& call : calls_) {
      if (call.peer >= 0 || call.begin < recorder_.first_) continue;
      Exchange exchange{.name = call.name,
                        .group = call.group,
                        .sequence = call.sequence,
                        .time = {call.begin, call.end}};
      const Phase* const backward = backward_at(call.begin);
      if (call.name.starts_with(kStatisticsPrefix)) {
        exchange.kind = Exchange::Kind::kStatistics;
        exchange.name.resize(std::min(exchange.name.size(), exchange.name.find(" (")));
      } else if (backward != nullptr && call.name == "all_reduce") {
        // The Reducer sends its buckets in order.
        if (std::exchange(backward_end, backward->time.end) != backward->time.end) bucket = 0;
        exchange.kind = Exchange::Kind::kGradients;
        exchange.name = fmt::format("DDP bucket {}", bucket++);
      }
      if (!kernels_.empty()) exchange.time = time_on_gpu(exchange.time);
      const bool has_waiter = call.waited_from >= 0 && kernels_.empty();
      exchange.blocked =
          has_waiter ? united({{call.waited_from, call.end}}) : common({exchange.time}, idle);
      const std::string size =
          call.bytes > 0
              ? fmt::format(", {}", base::format_bytes(static_cast<uint64_t>(call.bytes)))
              : "";
      recorder_.spans_[kExchangesTrack].push_back(
          {fmt::format("{}{} (#{} of {})", exchange.name, size, call.sequence, call.group),
           exchange.time});
      recorder_.profile_.exchanges.push_back(std::move(exchange));
    }
  }

  const Phase* backward_at(int64_t time) const {
    for (const Phase& phase : recorder_.profile_.phases) {
      if (phase.name == kBackwardPhase && phase.time.begin <= time && time < phase.time.end) {
        return &phase;
      }
    }
    return nullptr;
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

  void add_layers() {
    Intervals statistics;
    for (const Exchange& exchange : recorder_.profile_.exchanges) {
      if (exchange.kind == Exchange::Kind::kStatistics) statistics.push_back(exchange.time);
    }
    statistics = united(std::move(statistics));
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
      sum.calls += work.is_backward ? 0 : 1;
      recorder_.spans_[kLayersTrack].push_back(
          {work.layer + (work.is_backward ? " (backward)" : ""), work.time});
    }
  }

  Recorder& recorder_;
  std::vector<dist::TracedCall> calls_;
  const uint64_t thread_ = at::RecordFunction::currentThreadId();
  /// The layer that made an autograd node, by the thread of its operator and the sequence
  /// number; empty: none.
  std::map<std::pair<uint64_t, int64_t>, std::string> makers_;
  std::vector<Work> works_;
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

void Recorder::start() {
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
  const bool has_profiler = std::exchange(has_profiler_, false);
  const auto result = has_profiler ? torch::autograd::profiler::disableProfiler() : nullptr;
  reader.read(result ? result->event_tree() : std::vector<std::shared_ptr<kineto::Result>>());
}

void Recorder::begin_anew() {
  first_ = base::unix_ns();
  spans_.clear();
  profile_ = {};
}

std::vector<Track> Recorder::take(RankProfile& profile) {
  profile.phases = std::exchange(profile_.phases, {});
  profile.exchanges = std::exchange(profile_.exchanges, {});
  profile.layers = std::exchange(profile_.layers, {});
  std::vector<Track> tracks;
  for (auto& [name, spans] : std::exchange(spans_, {})) {
    if (name != kLayersTrack && name != kExchangesTrack) {
      tracks.push_back({name, std::move(spans)});
      continue;
    }
    for (Track& lane : in_lanes(name, std::move(spans))) tracks.push_back(std::move(lane));
  }
  return tracks;
}

}  // namespace syncbn::train
