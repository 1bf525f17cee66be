#include "common/component_error.h"

#include <c10/util/Exception.h>
#include <fmt/ranges.h>
#include <syncbn/dist/plain_message.h>
#include <syncbn/train/loss.h>
#include <syncbn/train/trainer.h>

#include <exception>
#include <stdexcept>
#include <vector>

#include "common/out_of_memory.h"

namespace syncbn::train {
namespace {

std::string shown_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return "nothing";
  return fmt::format("{} [{}]", at::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes(), ", "));
}

/// " with loss focal of libmine.so"; empty for a task without such a choice.
std::string loss_of(const Config& config) {
  const config::Value options = config.task.write();
  const config::Value* const type = options.at("loss.type");
  if (type == nullptr) return "";
  return " with " + component_name("loss", config::Component<LossKind>(type->scalar));
}

}  // namespace

std::string model_name(const Config& config, const at::Tensor& input) {
  return fmt::format("{}, given {}", component_name("model", config.model), shown_tensor(input));
}

std::string task_name(const Config& config, const Task::Outputs& outputs,
                      const at::Tensor& target) {
  std::vector<std::string> all;
  for (const at::Tensor& output : outputs) all.push_back(shown_tensor(output));
  const std::string given = all.empty() ? ""
                                        : fmt::format("outputs {} of {} and ", fmt::join(all, ", "),
                                                      component_name("model", config.model));
  return fmt::format("{}{}, given {}targets {}", component_name("task", config.task),
                     loss_of(config), given, shown_tensor(target));
}

void check_defined(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) throw std::runtime_error("it made an undefined tensor");
  }
}

void rethrow_as_of(const std::string& component) {
  try {
    throw;
  } catch (const base::Error&) {
    throw;
  } catch (const c10::DistError&) {
    throw;
  } catch (const QuietExit&) {
    throw;
  } catch (const std::exception& error) {
    if (is_out_of_memory(error)) throw;
    throw ComponentError(component + ": " + dist::plain_message(error), base::exit_code_of(error));
  } catch (...) {
    throw ComponentError(component + ": what it threw is not a std::exception",
                         base::kExitInternal);
  }
}

}  // namespace syncbn::train
