#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/config/command_line.h>
#include <syncbn/config/help_lines.h>
#include <syncbn/config/layers.h>

#include <syncbn/base/error.h>
#include "example.h"

namespace syncbn::config::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

const std::vector<FieldInfo> kOptions = [] {
  std::vector<FieldInfo> all = {option("config", "FILE"),  option("print_config", ""),
                                option("local_rank", "N"), option("list", "[KIND]"),
                                option("color", "WHEN"),   option("help", "", "-h")};
  all[0].type = "list of text";
  all[4].choices = {"auto", "always", "never"};
  return all;
}();

std::vector<FieldInfo> car_fields() {
  std::vector<FieldInfo> fields;
  Schema<CarOptions>::get().info("", fields);
  return fields;
}

/// The fields of two alternatives that share one of their keys.
std::vector<FieldInfo> fields_of_engines() {
  std::vector<FieldInfo> fields;
  for (const char* type : {"diesel", "electric"}) {
    FieldInfo field;
    field.type = "number";
    field.only_for = fmt::format("type: {}", type);
    field.path = "engine.power";
    field.default_value = fields.empty() ? "1" : "2";
    fields.push_back(field);
    field.path = "engine.weight";
    field.default_value = "";
    fields.push_back(field);
  }
  return fields;
}

/// The whole work of a program: reads the command line over a file into options.
struct Outcome {
  CommandLine line;
  CarOptions car;
  std::vector<std::string> faults;
};

Outcome read_all(const std::vector<std::string>& args, const std::string& file = "") {
  Outcome outcome;
  Faults faults;
  outcome.line = parse_command_line(args, kOptions, car_fields(), faults);
  Value config = parse_yaml(file, "car.yaml");
  merge(outcome.line.overrides, config, faults);
  Schema<CarOptions>::get().read(config, outcome.car, "", faults);
  outcome.faults = faults.messages();
  return outcome;
}

TEST(CommandLineTest, SetsKeysOverTheFile) {
  const Outcome outcome = read_all({"--doors", "3", "--wheel.radius=0.75", "--name=a: b #c"},
                                   "doors: 5\nwheel: {radius: 2, bolts: [9]}\n");
  EXPECT_THAT(outcome.faults, IsEmpty());
  EXPECT_EQ(outcome.car.doors, 3);
  EXPECT_EQ(outcome.car.wheel.radius, 0.75);
  EXPECT_THAT(outcome.car.wheel.bolts, ElementsAre(9));
  EXPECT_EQ(outcome.car.name, "a: b #c");
}

TEST(CommandLineTest, ReadsListsAndNull) {
  const Outcome outcome = read_all({"--wheel.bolts=[6, 7]", "--seats=null"}, "seats: 3\n");
  EXPECT_THAT(outcome.faults, IsEmpty());
  EXPECT_THAT(outcome.car.wheel.bolts, ElementsAre(6, 7));
  EXPECT_FALSE(outcome.car.seats);
}

TEST(CommandLineTest, TakesTheLastOfSeveralValues) {
  EXPECT_EQ(read_all({"--doors=3", "--doors=4"}).car.doors, 4);
  EXPECT_EQ(read_all({"doors=4", "--doors", "3"}).car.doors, 3);
  const Outcome outcome = read_all({"--config=a.yaml", "--config", "b.yaml"});
  EXPECT_THAT(outcome.line.program.at("config"), ElementsAre("a.yaml", "b.yaml"));
}

TEST(CommandLineTest, SetsKeysWithoutDashes) {
  const Outcome outcome = read_all({"wheel.radius=0.75", "engine=electric", "name=x=y"});
  EXPECT_THAT(outcome.faults, IsEmpty());
  EXPECT_EQ(outcome.car.wheel.radius, 0.75);
  EXPECT_EQ(outcome.car.engine.type(), "electric");
  EXPECT_EQ(outcome.car.name, "x=y");
  EXPECT_THAT(read_all({"wheel.radus=1", "radius=1", "-x=1"}).faults,
              ElementsAre("unknown key 'wheel.radus'; did you mean 'wheel.radius'?",
                          "unknown key 'radius'; did you mean 'wheel.radius'?",
                          "unknown option '-x'; see --help"));
}

TEST(CommandLineTest, ReachesIntoLists) {
  const Outcome outcome = read_all({"wheel.bolts.1=8"}, "wheel: {bolts: [6, 7]}\n");
  EXPECT_THAT(outcome.faults, IsEmpty());
  EXPECT_THAT(outcome.car.wheel.bolts, ElementsAre(6, 8));
  EXPECT_THAT(read_all({"--wheel.bolts.2=8"}, "wheel: {bolts: [6, 7]}\n").faults,
              ElementsAre("--wheel.bolts.2: the list has 2 items, and the first is item 0"));
  EXPECT_THAT(read_all({"--wheel.bolts.two=8"}).faults,
              ElementsAre("unknown option '--wheel.bolts.two'; did you mean '--wheel.bolts'?"));
}

TEST(CommandLineTest, LetsSwitchesStandAlone) {
  EXPECT_TRUE(read_all({"--sunroof"}).car.sunroof);
  EXPECT_TRUE(read_all({"--sunroof", "true"}).car.sunroof);
  EXPECT_FALSE(read_all({"--sunroof", "false"}, "sunroof: true").car.sunroof);
  EXPECT_FALSE(read_all({"--sunroof=false"}, "sunroof: true").car.sunroof);
  const Outcome outcome = read_all({"--sunroof", "--doors", "3"});
  EXPECT_TRUE(outcome.car.sunroof);
  EXPECT_EQ(outcome.car.doors, 3);
}

TEST(CommandLineTest, KeepsTheProgramsOwnOptionsApart) {
  const Outcome outcome = read_all({"--config", "a.yaml", "--local-rank=2", "--print-config"});
  EXPECT_THAT(outcome.faults, IsEmpty());
  EXPECT_EQ(outcome.line.value("config"), "a.yaml");
  EXPECT_EQ(outcome.line.value("local_rank"), "2");
  EXPECT_TRUE(outcome.line.has("print_config"));
  EXPECT_FALSE(outcome.line.has("help"));
  EXPECT_TRUE(read_all({"-h"}).line.has("help"));
  EXPECT_EQ(outcome.line.value("color"), std::nullopt);
  EXPECT_THAT(read_all({"--print_config=false"}).faults,
              ElementsAre("the option '--print_config' takes no value"));
  EXPECT_EQ(read_all({"--name", "-h"}).car.name, "-h");
  EXPECT_EQ(read_all({"--name=--config=x"}).car.name, "--config=x");
}

TEST(CommandLineTest, SwitchesToAnotherTypeAndDropsTheFormersOptions) {
  const Outcome outcome = read_all({"--engine.range=50", "--engine.type", "electric"},
                                   "engine: {type: diesel, litres: 3}\n");
  EXPECT_THAT(outcome.faults, IsEmpty());
  EXPECT_EQ(outcome.car.engine.make(1), "electric 50 km by ccs at 1");
}

TEST(CommandLineTest, KeepsTheFilesOptionsWhenTheTypeStays) {
  const Outcome outcome = read_all({"--engine=diesel"}, "engine: {type: diesel, litres: 3}\n");
  EXPECT_THAT(outcome.faults, IsEmpty());
  EXPECT_EQ(outcome.car.engine.make(1), "diesel 3 l at 1");
}

TEST(CommandLineTest, SetsAnOptionOfASectionWrittenByItsTypeAlone) {
  const Outcome outcome = read_all({"--engine.range=50"}, "engine: electric\n");
  EXPECT_THAT(outcome.faults, IsEmpty());
  EXPECT_EQ(outcome.car.engine.make(1), "electric 50 km by ccs at 1");
}

TEST(CommandLineTest, NamesTheOptionInFaultsOfItsValue) {
  EXPECT_THAT(read_all({"--doors=many", "--wheel.radius=-1", "--engine.range=5", "--colour=blue",
                        "--seats", "[", "--engine.litres=0"})
                  .faults,
              ElementsAre("--doors: expected an integer, got 'many'",
                          "--wheel.radius: must be above 0, got -1",
                          "--engine.range: unknown key 'engine.range'; it belongs to type "
                          "electric, the type here is diesel",
                          "--engine.litres: must be above 0, got 0",
                          "--colour: must be one of red, green, got 'blue'",
                          "--seats: expected an integer, got '['"));
}

TEST(CommandLineTest, LeavesAFileThatHoldsNoKeysToTheReader) {
  for (const char* file : {"word", "- a\n- b\n"}) {
    EXPECT_THAT(read_all({"--doors=3", "--engine.range=5"}, file).faults,
                ElementsAre(HasSubstr("car.yaml:1:1: expected lines of the form KEY: VALUE")));
  }
}

TEST(CommandLineTest, CutsLongArgumentsInMessages) {
  const std::string text(5000, 'x');
  for (const std::string& fault : read_all({"--" + text, text, "--doors=" + text}).faults) {
    EXPECT_LT(fault.size(), 180u) << fault;
  }
}

TEST(CommandLineTest, SuggestsTheNearestOption) {
  EXPECT_THAT(read_all({"--dors", "3", "--wheel.radus=1", "--conifg", "a.yaml"}).faults,
              ElementsAre("unknown option '--dors'; did you mean '--doors'?",
                          "unknown option '--wheel.radus'; did you mean '--wheel.radius'?",
                          "unknown option '--conifg'; did you mean '--config'?"));
  EXPECT_THAT(read_all({"--a-word-far-from-any"}).faults,
              ElementsAre("unknown option '--a-word-far-from-any'; see --help"));
}

TEST(CommandLineTest, RefusesWhatIsNoOption) {
  EXPECT_THAT(
      read_all({"car.yaml", "--doors", "--name"}).faults,
      ElementsAre("unexpected argument 'car.yaml'; to read this configuration, write "
                  "--config car.yaml",
                  "the option '--doors' needs a value", "the option '--name' needs a value"));
  EXPECT_THAT(
      read_all({"--config=", "--help=maybe", "--color=blue", "--doors=9"}).faults,
      ElementsAre("the option '--config' needs a value", "the option '--help' takes no value",
                  "--color: expected one of auto, always, never, got 'blue'",
                  "--doors: must be at least 2, at most 5, got 9"));
}

TEST(CommandLineTest, SaysWhatAWordWasProbablyMeantFor) {
  EXPECT_THAT(read_all({"-doors", "3"}).faults,
              ElementsAre("unknown option '-doors'; did you mean '--doors'?"));
  EXPECT_THAT(read_all({"doors", "3"}).faults,
              ElementsAre("unexpected argument 'doors'; did you mean '--doors'?"));
  EXPECT_THAT(read_all({"--wheel=3"}).faults,
              ElementsAre("unknown option '--wheel'; it is a section: set its keys, such as "
                          "'--wheel.radius'"));
  EXPECT_THAT(read_all({"=3", "--=3"}).faults, ElementsAre("unexpected argument '=3'; see --help",
                                                           "unknown option '--'; see --help"));
  EXPECT_THAT(read_all({"config=a.yaml", "conifg=a.yaml", "wheel=3"}).faults,
              ElementsAre("unknown key 'config'; did you mean '--config'?",
                          "unknown key 'conifg'; did you mean '--config'?",
                          "unknown key 'wheel'; it is a section: set its keys, such as "
                          "'wheel.radius'"));
}

TEST(CommandLineTest, NamesTheOptionAsItWasWritten) {
  EXPECT_THAT(read_all({"doors=many"}).faults,
              ElementsAre("doors: expected an integer, got 'many'"));
  EXPECT_THAT(read_all({"--doors={a: 1}"}, "doors: 3\n").faults,
              ElementsAre("--doors: expected an integer, got a section"));
  EXPECT_THAT(read_all({"--wheel.bolts.0=4", "--name=x"}, "name: y\n").faults,
              ElementsAre("--wheel.bolts.0: wheel.bolts: no file sets this list, so there is no "
                          "item 0 to change; write the whole list"));
  EXPECT_THAT(read_all({"engine=desel"}).faults,
              ElementsAre("engine.type: unknown type 'desel'; did you mean 'diesel'?"));
  EXPECT_THAT(read_all({"--engine", "{type: diesel, litres: 0}"}).faults,
              ElementsAre("--engine.litres: must be above 0, got 0"));
  EXPECT_THAT(read_all({"--seats=5"}, "doors: 2\n").faults,
              ElementsAre("--seats: two doors are for two seats"));
}

TEST(CommandLineTest, RefusesAnEmptyValueUnlessItIsAText) {
  EXPECT_THAT(
      read_all({"--seats=", "doors=", "--sunroof=", "--wheel.bolts.0", "", "--wheel.bolts="})
          .faults,
      ElementsAre("--seats: the value is empty; give it one (integer or null), or write null "
                  "for none",
                  "doors: the value is empty; give it one (integer)",
                  "--sunroof: the value is empty; give it one (true|false)",
                  "--wheel.bolts.0: the value is empty; give it one (integer)",
                  "--wheel.bolts: expected a list, as [], got nothing"));
  const Outcome outcome = read_all({"--name=", "--seats=null"}, "name: x\nseats: 3\n");
  EXPECT_THAT(outcome.faults, IsEmpty());
  EXPECT_EQ(outcome.car.name, "");
  EXPECT_FALSE(outcome.car.seats);
  Faults faults;
  parse_command_line({"--seats="}, kOptions, car_fields(), faults, {}, "-s");
  EXPECT_THAT(faults.messages(), ElementsAre(StartsWith("-s: the value is empty")));
}

TEST(CommandLineTest, SetsASectionWithATypeAsAWhole) {
  const Outcome outcome = read_all({"--engine", "{type: electric, range: 200}"});
  EXPECT_THAT(outcome.faults, IsEmpty());
  EXPECT_EQ(outcome.car.engine.make(1), "electric 200 km by ccs at 1");
  EXPECT_EQ(read_all({"--engine={litres: 3}"}).car.engine.make(1), "diesel 3 l at 1");
}

TEST(CommandLineTest, TakesYamlsSpellingsForASwitch) {
  EXPECT_TRUE(read_all({"--sunroof", "True"}).car.sunroof);
  EXPECT_FALSE(read_all({"--sunroof", "FALSE"}, "sunroof: true\n").car.sunroof);
}

TEST(CommandLineTest, TakesAnOptionWhoseValueIsLeftOut) {
  EXPECT_EQ(read_all({"--list"}).line.value("list"), "");
  EXPECT_EQ(read_all({"--list", "--doors=3"}).line.value("list"), "");
  EXPECT_EQ(read_all({"--list", "wheels"}).line.value("list"), "wheels");
  EXPECT_EQ(read_all({"--list=wheels"}).line.value("list"), "wheels");
}

TEST(CommandLineTest, TakesNegativeNumbersForValues) {
  EXPECT_THAT(read_all({"--doors", "-3"}).faults,
              ElementsAre("--doors: must be at least 2, at most 5, got -3"));
}

TEST(CommandLineTest, HelpListsOptionsAndKeysByGroup) {
  const std::string help = option_lines(kOptions) + "\n" + keys_text(car_fields());
  EXPECT_THAT(help, HasSubstr("\n  --list [KIND]\n"));
  EXPECT_THAT(help, HasSubstr("\n  -h,--help\n"));
  const std::string longest(25, 'x');
  EXPECT_EQ(help_line(longest, "text"), "  " + longest + " text\n");
  EXPECT_EQ(help_line(longest + "x", "text"),
            "  " + longest + "x\n" + std::string(28, ' ') + "text\n");
  EXPECT_THAT(help, HasSubstr("\nKeys of the configuration:\n  --name text"));
  EXPECT_THAT(help, HasSubstr("\n  --wheel                   .radius, .bolts, .pressures\n"));
  EXPECT_THAT(help, HasSubstr("\n  --engine                  diesel, electric"));
  EXPECT_THAT(help, ::testing::Not(HasSubstr("from hub to rim")));
  EXPECT_THAT(help, ::testing::Not(::testing::ContainsRegex(" \n")));
  size_t widest = 0;
  for (size_t begin = 0; begin < help.size();) {
    const size_t end = help.find('\n', begin);
    widest = std::max(widest, end - begin);
    begin = end + 1;
  }
  EXPECT_LE(widest, 100u);
}

TEST(CommandLineTest, HelpExplainsASectionATypeOrAKey) {
  EXPECT_EQ(help_topic({"--doors=3"}), std::nullopt);
  EXPECT_EQ(help_topic({"-h"}), "");
  EXPECT_EQ(help_topic({"--help", "--doors=3"}), "");
  EXPECT_EQ(help_topic({"--help", "doors=3"}), "");
  EXPECT_EQ(help_topic({"--doors=3", "--help", "wheel"}), "wheel");
  EXPECT_EQ(help_topic({"--help=wheel"}), "wheel");
  EXPECT_THAT(
      help_text("wheel", car_fields()),
      AllOf(StartsWith("wheel:\n  --wheel."),
            HasSubstr("from hub to rim (above 0; in m; default 0.5)"), Not(HasSubstr("engine"))));
  const std::string engine = help_text("engine", car_fields());
  EXPECT_THAT(engine, AllOf(HasSubstr("\nengine, type: electric:\n"), HasSubstr("--engine.range")));
  EXPECT_EQ(help_text("engine", fields_of_engines()),
            "engine, type: diesel, electric:\n"
            "  --engine.weight number\n"
            "\n"
            "engine, type: diesel:\n"
            "  --engine.power number     (default 1)\n"
            "\n"
            "engine, type: electric:\n"
            "  --engine.power number     (default 2)\n");
  EXPECT_THAT(help_text("engine.diesel", fields_of_engines()),
              AllOf(StartsWith("engine, type: diesel:\n  --engine.power"), HasSubstr(".weight")));
  const std::string electric = help_text("engine.electric", car_fields());
  EXPECT_THAT(electric, AllOf(HasSubstr("--engine.range"), Not(HasSubstr("litres"))));
  EXPECT_THAT(help_text("doors", car_fields()), StartsWith("  --doors integer"));
  EXPECT_THAT([] { help_text("weel", car_fields()); },
              ThrowsMessage<base::UserError>("--help weel: there is no such key or section; did "
                                             "you mean 'wheel'?"));
  EXPECT_THAT([] { help_text("unrelated", car_fields()); },
              ThrowsMessage<base::UserError>("--help unrelated: there is no such key or section"));
}

TEST(ListTextTest, ShowsAlternativesWithTheirOptionsAndOrigin) {
  Registry<int> registry("lamp");
  registry.add<DieselOptions>("oil", "smells", [](const DieselOptions&) { return 1; });
  registry.set_origin("");
  for (const char* name : {"arc", "neon"}) {
    registry.add<ElectricOptions>(name, "hums", [](const ElectricOptions&) { return 2; });
  }
  registry.set_origin("libneon.so");
  EXPECT_EQ(list_text(registry),
            "arc, neon                 hums [libneon.so]\n"
            "  range integer             how far it goes (at least 1; in km; default 300)\n"
            "  plug text                 how it is charged (default ccs)\n"
            "\n"
            "oil                       smells\n"
            "  litres number             displacement (above 0; default 2)\n");
}

TEST(RegistryTest, RefusesANameThatIsTaken) {
  Registry<int> registry("lamp");
  const auto add = [&] {
    registry.add<DieselOptions>("oil", "smells", [](const DieselOptions&) { return 1; });
  };
  add();
  EXPECT_THAT(add, ThrowsMessage<base::UserError>("the lamp 'oil' is registered already; choose "
                                                  "another name"));
  registry.set_origin("liblamp.so");
  registry.set_origin("");
  EXPECT_THAT(add, ThrowsMessage<base::UserError>(HasSubstr("already, by liblamp.so; choose")));
}

}  // namespace
}  // namespace syncbn::config::test
