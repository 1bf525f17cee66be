#include "checkpoints/run_state.h"

#include <ATen/Context.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>

#include "common/rank_0.h"
#include "step/model.h"

namespace syncbn::train {
namespace {

/// Whether batch norm's running statistics may differ between the ranks.
bool ranks_have_own_buffers(const Config& config) {
  return !config.sync_batchnorm || config.sync_batchnorm_group;
}

at::Generator generator_of_device() {
  return at::globalContext().defaultGenerator(dist::device());
}

}  // namespace

Checkpoint RunState::restore(Checkpoint checkpoint, const std::string& name) {
  if (!checkpoint.has_optimizer) {
    throw base::UserError("it holds a network without the state of the run; resume from last.pt");
  }
  load_model(checkpoint.model, model_);
  for (const auto& item : model_.named_parameters()) {
    // `freeze` may name other parameters than when the checkpoint was saved.
    if (!item.value().requires_grad()) checkpoint.optimizer.erase(item.key());
  }
  step_.optimizer().load(checkpoint.optimizer);
  loader_.resume(checkpoint.sampler);
  schedule_.load(checkpoint.schedule);
  if (step_.scaler() != nullptr && !checkpoint.scaler.empty()) {
    step_.scaler()->load(checkpoint.scaler);
  }
  // Without averages in the checkpoint, they start with its parameters.
  if (step_.ema() != nullptr) {
    step_.ema()->load(checkpoint.ema.empty() ? checkpoint.model : checkpoint.ema);
  }
  if (checkpoint.world_size == dist::world_size()) {
    const auto rank = static_cast<size_t>(dist::rank());
    if (rank < checkpoint.rng_states.size()) {
      restore_random_numbers(checkpoint.rng_states[rank], name);
    }
    if (rank < checkpoint.rank_buffers.size()) load_buffers(checkpoint.rank_buffers[rank], model_);
  }
  for (auto* tensors : {&checkpoint.model, &checkpoint.ema, &checkpoint.scaler}) tensors->clear();
  checkpoint.optimizer.clear();
  checkpoint.rng_states.clear();
  checkpoint.rank_buffers.clear();
  return checkpoint;
}

void RunState::restore_random_numbers(const at::Tensor& state, const std::string& name) const {
  at::Generator generator = generator_of_device();
  if (state.sizes() == generator.get_state().sizes()) return generator.set_state(state);
  if (!is_rank_0()) return;
  spdlog::warn("{} was made on another type of device: the run continues, but not bit for bit",
               name);
}

Checkpoint RunState::add_to(Checkpoint position) const {
  Checkpoint& all = position;
  all.rng_states = dist::all_gather(generator_of_device().get_state());
  all.model = state_of(model_);
  if (ranks_have_own_buffers(config_)) {
    all.rank_buffers = dist::all_gather(packed_buffers(model_));
    for (const auto& [name, buffer] : unpacked_buffers(all.rank_buffers[0], model_)) {
      all.model[name] = buffer;
    }
  }
  if (step_.ema() != nullptr) all.ema = step_.ema()->state();
  all.optimizer = step_.optimizer().state();
  if (step_.scaler() != nullptr) all.scaler = step_.scaler()->state();
  all.schedule = schedule_.state();
  all.world_size = dist::world_size();
  return position;
}

}  // namespace syncbn::train
