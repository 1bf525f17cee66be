#pragma once

#include <fmt/format.h>
#include <syncbn/config/schema.h>
#include <syncbn/config/yaml.h>

#include <string>
#include <vector>

namespace syncbn::config::test {

/// The example's alternatives, each of which makes a name.
struct EngineKind {
  using Registry = config::Registry<std::string, int>;
  static Registry& registry();
};

struct WheelOptions {
  double radius = 0.5;
  std::vector<int64_t> bolts = {4, 5};
  std::vector<double> pressures = {2, 3};
  static void describe(Schema<WheelOptions>& schema) {
    schema.field("radius", &WheelOptions::radius, "from hub to rim").above(0).unit("m");
    schema.field("bolts", &WheelOptions::bolts, "bolts of each wheel").at_least(3);
    schema.field("pressures", &WheelOptions::pressures, "least and most").length(2).above(0);
  }
};

/// An option struct with a field of each type.
struct CarOptions {
  std::string name = "none";
  std::string colour = "red";
  int64_t doors = 4;
  std::optional<int64_t> seats;
  bool sunroof = false;
  WheelOptions wheel;
  Component<EngineKind> engine{"diesel"};

  static void describe(Schema<CarOptions>& schema) {
    schema.field("name", &CarOptions::name, "what it is called");
    schema.field("colour", &CarOptions::colour, "what it looks like").one_of({"red", "green"});
    schema.field("doors", &CarOptions::doors, "how many doors").at_least(2).at_most(5);
    schema.field("seats", &CarOptions::seats, "how many seats").at_least(1);
    schema.field("sunroof", &CarOptions::sunroof, "a hole in the roof");
    schema.field("wheel", &CarOptions::wheel, "all four of them");
    schema.field("engine", &CarOptions::engine, "what moves it");
    schema.check([](const CarOptions& car) -> std::optional<std::string> {
      if (car.seats && *car.seats > 2 && car.doors == 2) return "two doors are for two seats";
      return std::nullopt;
    });
  }
};

struct DieselOptions {
  double litres = 2;
  static void describe(Schema<DieselOptions>& schema) {
    schema.field("litres", &DieselOptions::litres, "displacement").above(0);
  }
};

struct ElectricOptions {
  int64_t range = 300;
  std::string plug = "ccs";
  static void describe(Schema<ElectricOptions>& schema) {
    schema.field("range", &ElectricOptions::range, "how far it goes").unit("km").at_least(1);
    schema.field("plug", &ElectricOptions::plug, "how it is charged");
  }
};

inline EngineKind::Registry& EngineKind::registry() {
  static Registry registry = [] {
    Registry made("engine");
    made.add<DieselOptions>("diesel", "burns oil", [](const DieselOptions& options, int speed) {
      return fmt::format("diesel {} l at {}", options.litres, speed);
    });
    made.add<ElectricOptions>("electric", "hums", [](const ElectricOptions& options, int speed) {
      return fmt::format("electric {} km by {} at {}", options.range, options.plug, speed);
    });
    return made;
  }();
  return registry;
}

/// An option of a program, whose last value counts.
/// @param value_name "FILE"; "[KIND]": may be left out; empty: a switch
inline FieldInfo option(const std::string& name, const std::string& value_name,
                        const std::string& letter = "", unsigned tags = 0) {
  FieldInfo one;
  one.path = name;
  one.type = value_name.empty() ? "true|false" : "text";
  one.value_name = value_name;
  one.letter = letter;
  one.tags = tags;
  return one;
}

/// Reads text into options and returns the faults.
template <class T>
std::vector<std::string> read(const std::string& text, T& out) {
  Faults faults;
  Schema<T>::get().read(parse_yaml(text, "car.yaml"), out, "", faults);
  return faults.messages();
}

}  // namespace syncbn::config::test
