#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/config/layers.h>

#include <filesystem>

#include "example.h"
#include "support/temp_folder.h"
#include "support/thrown.h"

namespace syncbn::config::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string merged(const std::string& under, const std::string& over) {
  Faults faults;
  Value value = parse_yaml(under, "under");
  merge(parse_yaml(over, "over"), value, faults);
  faults.throw_if_any();
  return to_yaml(value);
}

TEST(LayersTest, MergesSectionsAndReplacesAllElse) {
  EXPECT_EQ(merged("a: 1\nb: {c: 1, d: {e: 1, f: 2}}\n", "b: {d: {f: 3}}\ng: 4\n"),
            "a: 1\nb:\n  c: 1\n  d:\n    e: 1\n    f: 3\ng: 4\n");
  EXPECT_EQ(merged("list: [1, 2, 3]\n", "list: [4]\n"), "list: [4]\n");
  EXPECT_EQ(merged("a: {b: 1}\n", "a: null\n"), "a: null\n");
  EXPECT_EQ(merged("a: 1\n", ""), "a: 1\n");
  EXPECT_EQ(merged("", "a: 1\n"), "a: 1\n");
}

TEST(LayersTest, AnotherTypeDropsTheKeysOfTheFormer) {
  EXPECT_EQ(merged("o: {type: sgd, lr: 1}\n", "o: {type: adam, beta: 2}\n"),
            "o:\n  type: adam\n  beta: 2\n");
  EXPECT_EQ(merged("o: {type: sgd, lr: 1}\n", "o: adam\n"), "o:\n  type: adam\n");
  EXPECT_EQ(merged("o: {type: sgd, lr: 1}\n", "o: sgd\n"), "o:\n  type: sgd\n  lr: 1\n");
  EXPECT_EQ(merged("o: sgd\n", "o: {lr: 1}\n"), "o:\n  type: sgd\n  lr: 1\n");
}

TEST(LayersTest, WhatAnotherTypeLacksIsMissingWhereTheTypeWasSet) {
  const auto place = [](const std::string& over) {
    Faults faults;
    Value value = parse_yaml("o: {type: sgd, lr: 1}\n", "under");
    merge(parse_yaml(over, "over"), value, faults);
    return value.find("o")->mark.str();
  };
  EXPECT_EQ(place("o: {lr: 2, type: adam}\n"), "over:1:18");
  EXPECT_EQ(place("o: adam\n"), "over:1:4");
  EXPECT_EQ(place("o: {lr: 2, type: sgd}\n"), "under:1:4");
}

TEST(LayersTest, ASectionsKeyIsFoundByItsPath) {
  const Value value = parse_yaml("a: {b: {c: 1}}\nd: [2]\n", "file");
  EXPECT_EQ(value.at("a.b.c")->scalar, "1");
  EXPECT_EQ(value.at("d"), value.find("d"));
  for (const char* path : {"", "c", "a.c", "a.b.c.d", "a.", "d.0"}) {
    EXPECT_EQ(value.at(path), nullptr) << path;
  }
}

TEST(LayersTest, NumbersNameItemsOfLists) {
  EXPECT_EQ(merged("l: [{type: crop, size: 1}, flip]\n", "l: {0: {size: 2}, 1: blur}\n"),
            "l: [{type: crop, size: 2}, blur]\n");
  EXPECT_THROW(merged("l: [1]\n", "l: {1: 2}\n"), base::UserError);
}

/// Files in their own folder.
class LayeredFilesTest : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) {
    base::write_file_atomically(folder_ / name, text);
  }

  Value load(const std::vector<std::string>& names) {
    std::vector<std::filesystem::path> files;
    for (const std::string& name : names) files.push_back(folder_ / name);
    Faults faults;
    Value value = load_files(files, faults);
    faults.throw_if_any();
    return value;
  }

  /// The message that load() throws, with "DIR" for folders.
  std::string error_of(const std::vector<std::string>& names) {
    std::string text = syncbn::test::message_of<base::UserError>([&] { load(names); });
    const std::string folder = folder_.path().string();
    for (size_t at = 0; (at = text.find(folder)) != text.npos;) {
      text.replace(at, folder.size(), "DIR");
    }
    return text;
  }

  const syncbn::test::TempFolder folder_;
};

TEST_F(LayeredFilesTest, AFileIsWrittenOverItsBases) {
  write("more/a.yaml", "x: 1\nk: 1\nz: 1\n");
  write("more/b.yaml", "base: a.yaml\nk: 2\nz: 2\n");
  write("c.yaml", "w: 3\n");
  write("d.yaml", "base: [more/b.yaml, c.yaml]\nz: 4\n");
  const Value value = load({"d.yaml"});
  EXPECT_EQ(to_yaml(value), "x: 1\nk: 2\nz: 4\nw: 3\n");
  EXPECT_EQ(value.find("k")->mark.str(), (folder_ / "more/b.yaml").string() + ":2:4");
  EXPECT_EQ(*value.mark.source, (folder_ / "d.yaml").string());
}

TEST_F(LayeredFilesTest, LaterFilesAreWrittenOverEarlierOnes) {
  write("a.yaml", "x: 1\nk: 1\n");
  write("b.yaml", "k: 2\n");
  write("empty.yaml", "");
  EXPECT_EQ(to_yaml(load({"a.yaml", "b.yaml", "empty.yaml"})), "x: 1\nk: 2\n");
  EXPECT_EQ(to_yaml(load({"b.yaml", "a.yaml"})), "k: 1\nx: 1\n");
}

TEST_F(LayeredFilesTest, NamesTheChainToAFileThatIsNotThere) {
  write("a.yaml", "base: b.yaml\n");
  write("b.yaml", "x: 1\nbase: [c.yaml]\n");
  EXPECT_EQ(error_of({"a.yaml"}),
            "DIR/b.yaml:2:8: base: there is no file DIR/c.yaml (DIR/a.yaml, based on DIR/b.yaml)");
  write("d.yaml", "base: c.yaml\n");
  EXPECT_EQ(error_of({"d.yaml"}), "DIR/d.yaml:1:7: base: there is no file DIR/c.yaml");
  std::filesystem::create_symlink("c.yaml", folder_ / "c.yaml");
  EXPECT_EQ(error_of({"d.yaml"}),
            "DIR/d.yaml:1:7: base: DIR/c.yaml: Too many levels of symbolic links");
}

TEST_F(LayeredFilesTest, RefusesAFileThatIsBasedOnItself) {
  write("a.yaml", "base: b.yaml\n");
  write("b.yaml", "base: ./a.yaml\n");
  EXPECT_EQ(error_of({"a.yaml"}),
            "DIR/b.yaml:1:7: base: DIR/./a.yaml is based on itself (DIR/a.yaml, based on "
            "DIR/b.yaml)");
}

TEST_F(LayeredFilesTest, RefusesABaseThatIsNoFile) {
  write("a.yaml", "base: {b: c}\n");
  EXPECT_EQ(error_of({"a.yaml"}),
            "DIR/a.yaml:1:7: base: expected a file or a list of files, got a section");
  write("a.yaml", "base:\n");
  EXPECT_THAT(error_of({"a.yaml"}), HasSubstr("expected a file or a list of files, got nothing"));
}

TEST_F(LayeredFilesTest, SaysWhatABaseCannotBe) {
  write("a.yaml", "base: ${env:HOME}/b.yaml\n");
  EXPECT_EQ(error_of({"a.yaml"}),
            "DIR/a.yaml:1:7: base: '${env:HOME}/b.yaml' has a reference, which base cannot have; "
            "write the path of a file, relative to this one");
  write("c.yaml", "base: .\n");
  EXPECT_EQ(error_of({"c.yaml"}), "DIR/c.yaml:1:7: base: DIR/. is a folder");
}

TEST_F(LayeredFilesTest, ATildeInABaseIsTheHomeFolder) {
  write("b.yaml", "x: 1\n");
  write("a.yaml", "base: ~/b.yaml\n");
  const std::string home = ::getenv("HOME");
  ::setenv("HOME", folder_.path().c_str(), 1);
  EXPECT_EQ(to_yaml(load({"a.yaml"})), "x: 1\n");
  ::setenv("HOME", home.c_str(), 1);
}

TEST_F(LayeredFilesTest, AnEmptyFileIsThePlaceOfMissingKeys) {
  write("empty.yaml", "# nothing\n");
  Value value = load({"empty.yaml"});
  Value over = parse_yaml("x: 1\n", "--x");
  Faults faults;
  merge(over, value, faults);
  EXPECT_EQ(*value.mark.source, (folder_ / "empty.yaml").string());
}

TEST_F(LayeredFilesTest, RefusesBasesThatDoubleWithoutEnd) {
  for (int i = 0; i < 30; ++i) {
    write(fmt::format("{}.yaml", i), fmt::format("base: [{0}.yaml, {0}.yaml]\n", i + 1));
  }
  write("30.yaml", "x: 1\n");
  EXPECT_THAT(error_of({"0.yaml"}), HasSubstr("base: more than 100 files"));
}

/// A text with its references resolved, and the faults.
struct Resolved {
  std::string text;
  std::vector<std::string> faults;
};

Resolved resolve(const std::string& text, const std::string& file = "dir/car.yaml") {
  std::vector<FieldInfo> fields;
  Schema<CarOptions>::get().info("", fields);
  Value value = parse_yaml(text, file);
  Faults faults;
  resolve_references(value, fields, faults);
  return {to_yaml(value), faults.messages()};
}

TEST(ReferencesTest, StandForOtherKeys) {
  EXPECT_EQ(resolve("a: 3\nb: ${a}\nc: x-${a}-${b}\n").text, "a: 3\nb: 3\nc: x-3-3\n");
  EXPECT_EQ(resolve("a: ${b.1.c}\nb: [0, {c: 5}]\n").text, "a: 5\nb: [0, {c: 5}]\n");
  EXPECT_EQ(resolve("a: {x: 1}\nb: ${a}\nc: [\"${a.x}\"]\n").text,
            "a:\n  x: 1\nb:\n  x: 1\nc: [1]\n");
  EXPECT_EQ(resolve("a: ${b}\nb: ${c}\nc: [1]\n").text, "a: [1]\nb: [1]\nc: [1]\n");
  EXPECT_EQ(resolve("a: ${engine.type}\nengine: diesel\n").text, "a: diesel\nengine: diesel\n");
}

TEST(ReferencesTest, StandForDefaults) {
  EXPECT_EQ(resolve("a: ${doors}\nb: ${wheel.bolts}\nc: ${seats}\nd: ${name}\n").text,
            "a: 4\nb: [4, 5]\nc: null\nd: none\n");
}

TEST(ReferencesTest, StandForDefaultsOfTheAlternativeThatIsChosen) {
  EXPECT_EQ(resolve("a: ${engine.litres}\n").text, "a: 2\n") << "diesel is the default";
  EXPECT_EQ(resolve("a: ${engine.range}\nengine: electric\n").text, "a: 300\nengine: electric\n");
  EXPECT_EQ(resolve("a: ${engine.plug}\nengine: {type: \"${b}\", range: 9}\nb: electric\n").text,
            "a: ccs\nengine:\n  type: electric\n  range: 9\nb: electric\n");
  EXPECT_THAT(
      resolve("a: ${engine.range}\n").faults,
      ElementsAre("dir/car.yaml:1:4: a: ${engine.range}: the key 'engine.range' is not set; "
                  "set it, or write a default: ${engine.range:-DEFAULT}"));
}

TEST(ReferencesTest, StandForEnvironmentVariables) {
  ::setenv("SYNCBN_TEST_DATA", "/data", 1);
  ::unsetenv("SYNCBN_TEST_NONE");
  EXPECT_EQ(resolve("a: ${env:SYNCBN_TEST_DATA}/x\n").text, "a: /data/x\n");
  EXPECT_EQ(resolve("a: ${env:SYNCBN_TEST_NONE:-7}\nb: ${no.key:-x}\n").text, "a: 7\nb: x\n");
  EXPECT_THAT(resolve("a: ${env:SYNCBN_TEST_NONE}\n").faults,
              ElementsAre("dir/car.yaml:1:4: a: ${env:SYNCBN_TEST_NONE}: the environment variable "
                          "SYNCBN_TEST_NONE is not set; set it, or write a default: "
                          "${env:SYNCBN_TEST_NONE:-DEFAULT}"));
  ::unsetenv("SYNCBN_TEST_DATA");
}

TEST(ReferencesTest, StandForTheFilesFolder) {
  const std::string cwd = std::filesystem::current_path();
  EXPECT_EQ(resolve("a: ${here}/images\n").text, "a: " + cwd + "/dir/images\n");
  EXPECT_EQ(resolve("a: ${here}/images\n", "car.yaml").text, "a: " + cwd + "/images\n");
}

TEST(ReferencesTest, ATildeIsTheHomeFolder) {
  EXPECT_EQ(resolve("a: ~/x\nb: x~/y\n").text, fmt::format("a: {}/x\nb: x~/y\n", ::getenv("HOME")));
}

TEST(ReferencesTest, DollarsMayBeLiteral) {
  EXPECT_EQ(resolve("a: x$${b}\nb: $x\nc: ${a}\n").faults, std::vector<std::string>());
  EXPECT_EQ(resolve("a: x$${b}\nc: ${a}\n").text, "a: x${b}\nc: x${b}\n");
}

TEST(ReferencesTest, TextThatIsEscapedStandsForItself) {
  Value value = parse_yaml("a: [\"x${b}\"]\nc: {d: \"${here}$${\"}\n", "a.yaml");
  const std::string text = to_yaml(value);
  escape_references(value);
  EXPECT_EQ(resolve(to_yaml(value)).text, text);
}

TEST(ReferencesTest, NamesWhatIsMissing) {
  EXPECT_THAT(resolve("a: x${b\n").faults,
              ElementsAre("dir/car.yaml:1:4: a: '${' is not closed; for this text, write $${"));
  EXPECT_THAT(resolve("a: ${radius}\n").faults,
              ElementsAre("dir/car.yaml:1:4: a: ${radius}: the key 'radius' is not set (is it "
                          "'wheel.radius'?); set it, or write a default: ${radius:-DEFAULT}"));
  EXPECT_THAT(resolve("a: x${b}\nb: [1]\n").faults,
              ElementsAre("dir/car.yaml:1:4: a: ${b} is a list, which cannot be part of a text"));
}

TEST(ReferencesTest, NeedANameWithoutReferences) {
  EXPECT_THAT(resolve("a: ${}\nb: ${env:}\n").faults,
              ElementsAre("dir/car.yaml:1:4: a: ${} has no name; write ${KEY} or ${env:VARIABLE}",
                          "dir/car.yaml:2:4: b: ${env:} has no name; write ${KEY} or "
                          "${env:VARIABLE}"));
  EXPECT_THAT(resolve("a: ${env:X:-${b}}\nb: 1\n").faults,
              ElementsAre("dir/car.yaml:1:4: a: ${env:X:-${b} has a reference within a "
                          "reference, which is not possible"));
}

TEST(ReferencesTest, TellAnEmptyVariableFromOneThatIsNotSet) {
  ::setenv("SYNCBN_TEST_EMPTY", "", 1);
  EXPECT_THAT(resolve("a: ${env:SYNCBN_TEST_EMPTY}\n").faults.front(),
              HasSubstr("the environment variable SYNCBN_TEST_EMPTY is empty; set it"));
  ::unsetenv("SYNCBN_TEST_EMPTY");
}

TEST(ReferencesTest, WithoutAValueAreOneFault) {
  const auto faults_of = [](const std::string& text) {
    std::vector<FieldInfo> fields;
    Schema<CarOptions>::get().info("", fields);
    Value value = parse_yaml(text, "car.yaml");
    Faults faults;
    resolve_references(value, fields, faults);
    CarOptions car;
    Schema<CarOptions>::get().read(value, car, "", faults);
    return faults.messages();
  };
  const std::string fault = "${env:SYNCBN_TEST_NONE}: the environment variable";
  for (const std::string text :
       {"doors: ${env:SYNCBN_TEST_NONE}\nseats: ${doors}\nname: x${seats}\n",
        "engine: ${env:SYNCBN_TEST_NONE}\n", "engine: {type: \"${env:SYNCBN_TEST_NONE}\"}\n",
        "wheel: ${env:SYNCBN_TEST_NONE}\n", "wheel: {bolts: [3, \"${env:SYNCBN_TEST_NONE}\"]}\n"}) {
    EXPECT_THAT(faults_of(text), ElementsAre(HasSubstr(fault))) << text;
  }
}

TEST(ReferencesTest, RefusesCircles) {
  EXPECT_THAT(resolve("a: ${a}\n").faults, ElementsAre("dir/car.yaml:1:4: a: a refers to itself"));
  EXPECT_THAT(resolve("a: ${b}\nb: x${c}\nc: ${a}\n").faults,
              ElementsAre("dir/car.yaml:3:4: c: a refers to itself through b, c"));
  EXPECT_THAT(resolve("a: {b: \"${a}\"}\n").faults,
              ElementsAre("dir/car.yaml:1:8: a.b: a refers to itself through a.b"));
}

TEST(ReferencesTest, RefusesReferencesThatExplode) {
  std::string texts = "a0: xxxxxxxxxx\n";
  std::string lists = "a0: [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n";
  for (int i = 1; i < 40; ++i) {
    texts += fmt::format("a{0}: x${{a{1}}}${{a{1}}}\n", i, i - 1);
    lists += fmt::format("a{0}: [\"${{a{1}}}\", \"${{a{1}}}\"]\n", i, i - 1);
  }
  EXPECT_THAT(resolve(texts).faults, Not(IsEmpty()));
  EXPECT_THAT(resolve(texts).faults.front(), HasSubstr("its references make it too long"));
  EXPECT_THAT(resolve(lists).faults.front(), HasSubstr("its references make it too large"));
}

TEST(OriginsTest, AreWrittenBehindEachValue) {
  Faults faults;
  Value origins = parse_yaml("doors: 3\nengine: electric\nwheel: {bolts: [5,\n  6]}\n", "car.yaml");
  CarOptions car;
  Schema<CarOptions>::get().read(origins, car, "", faults);
  EXPECT_THAT(faults.messages(), IsEmpty());
  const std::string text = to_yaml(Schema<CarOptions>::get().write(car), origins);
  EXPECT_THAT(text, AllOf(HasSubstr("\ndoors: 3                                  # car.yaml:1\n"),
                          HasSubstr("\nseats: null                               # default\n"),
                          HasSubstr("\n  bolts: [5, 6]                           # car.yaml:3, "
                                    "car.yaml:4\n"),
                          HasSubstr("\n  type: electric                          # car.yaml:2\n"),
                          HasSubstr("\n  range: 300                              # default\n")));
  EXPECT_EQ(to_yaml(parse_yaml(text, "back")), to_yaml(Schema<CarOptions>::get().write(car)));
}

}  // namespace
}  // namespace syncbn::config::test
