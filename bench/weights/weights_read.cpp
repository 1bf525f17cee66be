// Reads the weights of a ResNet-50 (102 MB) for each line of standard input: "read" until the
// tensors exist, "load" until a network has their values.
#include <syncbn/models/resnet.h>
#include <syncbn/models/weights.h>

#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

namespace {

using namespace syncbn;

double seconds_of(const auto& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: weights_read FILE\n";
    return 2;
  }
  const std::string file = argv[1];
  const auto network = models::resnet50({});
  for (std::string line; std::getline(std::cin, line);) {
    const double seconds = seconds_of([&] {
      const models::StateDict weights = models::read_state_dict(file);
      if (line == "load") models::load_state_dict(*network, weights);
    });
    std::cout << nlohmann::json{{"seconds", seconds}} << std::endl;
  }
  return 0;
}
