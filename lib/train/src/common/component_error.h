#pragma once

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/config/component.h>
#include <syncbn/train/config.h>
#include <syncbn/train/task.h>

#include <string>
#include <vector>

namespace syncbn::train {

/// An exception of a network, a loss, a metric or a data set; the message begins with its name.
class ComponentError : public base::Error {
 public:
  ComponentError(const std::string& message, int exit_code) : base::Error(message, exit_code) {}
};

/// The plug-in that provides what a configuration chose; empty if this program provides it.
template <class Kind>
std::string plugin_of(const config::Component<Kind>& component) {
  return Kind::registry().entries().at(component.type()).origin.value_or("");
}

/// "model mlp", or "model mlp of librings.so" for a plug-in's.
template <class Kind>
std::string component_name(const char* noun, const config::Component<Kind>& component) {
  const std::string plugin = plugin_of(component);
  return fmt::format("{} {}{}", noun, component.type(), plugin.empty() ? "" : " of " + plugin);
}

/// "model mlp of librings.so, given Float [20, 2]"
std::string model_name(const Config& config, const at::Tensor& input);

/// "task classification with loss focal of libmine.so, given outputs Float [20, 3] of model mlp and
/// targets Long [20]"; without outputs, for the task's work before the network
std::string task_name(const Config& config, const Task::Outputs& outputs, const at::Tensor& target);

/// @throws std::runtime_error if one is undefined
void check_defined(const std::vector<at::Tensor>& tensors);

/// Call it in a handler: throws a ComponentError for the exception. Rethrows errors of this
/// project, of a lack of memory and of the process group unchanged, since the component is not
/// their cause.
[[noreturn]] void rethrow_as_of(const std::string& component);

/// Calls `work`, which runs code of a component.
/// @param name returns the component's name
/// @throws ComponentError with the exit code that the exception would have had
template <class Name, class Work>
auto blaming(const Name& name, const Work& work) {
  try {
    return work();
  } catch (...) {
    rethrow_as_of(name());
  }
}

/// blaming() before the first step, where a component's error counts as a mistake in the
/// configuration.
/// @throws base::UserError
template <class Name, class Work>
auto refusing(const Name& name, const Work& work) {
  try {
    return blaming(name, work);
  } catch (const ComponentError& error) {
    throw base::UserError(error.what());
  }
}

/// Calls `work`. Prepends the place to the message of a ComponentError: "step 1: model mlp ...".
template <class Place, class Work>
auto placing(const Place& place, const Work& work) {
  try {
    return work();
  } catch (const ComponentError& error) {
    throw ComponentError(place() + ": " + error.what(), error.exit_code());
  }
}

}  // namespace syncbn::train
