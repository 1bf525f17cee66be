#include <gmock/gmock.h>
#include <syncbn/config/options.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "example.h"

namespace syncbn::config::test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr unsigned kFirst = 1;
constexpr unsigned kMayBeEmpty = 2;

std::vector<FieldInfo> options() {
  return {option("workers", "N", "", kFirst),
          option("nodes", "N"),
          option("node_rank", "N", "", kFirst),
          option("redirects", "N", "-r"),
          option("tee", "N", "-t"),
          option("module", "", "-m"),
          option("log_dir", "F", "", kMayBeEmpty),
          option("log_level", "LEVEL"),
          option("list", "[KIND]")};
}

SplitLine split(const std::vector<std::string>& words, Faults& faults) {
  const std::vector<FieldInfo> all = options();
  return split_line({.options = all,
                     .help = "all --help",
                     .has_program = true,
                     .abbreviated = kFirst,
                     .may_be_empty = kMayBeEmpty},
                    words, faults);
}

TEST(SplitLineTest, SpellsOptionsInFullAndFindsTheProgram) {
  struct Case {
    std::vector<std::string> words, options, program;
  };
  for (const auto& [words, options, program] : std::vector<Case>{
           {{"--workers=4", "prog"}, {"--workers=4"}, {"prog"}},
           {{"--node-rank", "4", "prog"}, {"--node_rank=4"}, {"prog"}},
           {{"--wor", "4", "prog"}, {"--workers=4"}, {"prog"}},
           {{"--log-d", "4", "prog"}, {"--log_dir=4"}, {"prog"}},
           {{"--mod", "prog"}, {"--module"}, {"prog"}},
           {{"--module=False", "prog"}, {"--module=False"}, {"prog"}},
           {{"-r", "3", "-t2", "-m", "prog"}, {"--redirects=3", "--tee=2", "--module"}, {"prog"}},
           {{"--nodes=a=1,b=2", "--tee", "-x"}, {"--nodes=a=1,b=2", "--tee=-x"}, {}},
           {{"--module", "--", "--odd-name", "a"}, {"--module"}, {"--odd-name", "a"}},
           {{"--nodes=2", "prog", "--help", "--nodes", "7", "-x", "--", ""},
            {"--nodes=2"},
            {"prog", "--help", "--nodes", "7", "-x", "--", ""}},
           {{"--log_dir=a", "--log_dir=", "--nodes=1", "-"}, {"--nodes=1"}, {"-"}},
           {{"--log_dir=", "--log_dir", "b"}, {"--log_dir=b"}, {}},
           {{"--list", "--list", "a"}, {"--list", "", "--list=a"}, {}},
           {{"--nodes", "--module", "prog"}, {"--nodes=--module"}, {"prog"}},
           {{"--node=4"}, {"--node_rank=4"}, {}}}) {  // kFirst's, not --nodes
    Faults faults;
    const SplitLine line = split(words, faults);
    EXPECT_THAT(faults.messages(), IsEmpty());
    EXPECT_EQ(line.options, options);
    EXPECT_EQ(line.program, program);
  }
}

TEST(SplitLineTest, NamesTheFirstMistakeBeforeAProgram) {
  for (const auto& [words, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--nods", "2", "prog", "--x"}, "unknown option '--nods'; did you mean '--nodes'?"},
           {{"--far-from-any"}, "unknown option '--far-from-any'; see all --help"},
           {{"-z"}, "unknown option '-z'; see all --help"},
           {{"-mx"}, "unknown option '-mx'; see all --help"},
           {{"--log=2"}, "the option '--log' is ambiguous: --log_dir, --log_level"},
           {{"--nodes"}, "the option '--nodes' needs a value"},
           {{"--nodes=", "prog"}, "the option '--nodes' needs a value"},
           {{"--log_dir"}, "the option '--log_dir' needs a value"},
           {{"--module={}", "prog"}, "--module: expected true or false, got '{}'"}}) {
    Faults faults;
    split(words, faults);
    EXPECT_THAT(faults.messages(), ElementsAre(message));
  }
}

TEST(ReadOptionsTest, TakesTheLastValueOrAllAndWhatAVariableSays) {
  std::vector<FieldInfo> all = options();
  all.front().type = "list of text";
  ::setenv("SYNCBN_TEST_MODULE", "", 1);
  ::setenv("SYNCBN_TEST_TEE", "{}", 1);
  Faults faults;
  const OptionValues read = read_options(
      all,
      {"--workers=1", "--nodes=1", "a=b", "--nodes=[2,3]", "--list", "", "--workers=2", "--c.d=-e"},
      faults, {{"module", "SYNCBN_TEST_MODULE"}, {"tee", "SYNCBN_TEST_TEE"}});
  EXPECT_THAT(read.values,
              ElementsAre(Pair("list", ElementsAre("")), Pair("module", ElementsAre("true")),
                          Pair("nodes", ElementsAre("[2,3]")), Pair("tee", ElementsAre("{}")),
                          Pair("workers", ElementsAre("1", "2"))));
  EXPECT_THAT(read.remaining, ElementsAre("a=b", "--c.d=-e"));
  EXPECT_THAT(faults.messages(), IsEmpty());
}

TEST(ReadOptionsTest, NamesAllValuesThatAreRefused) {
  std::vector<FieldInfo> all = options();
  all[0].choices = {"one", "two"};
  all[1].min = 1;
  all[1].max = 4;
  for (const char* bad : {"0", "5", "x", "nan"}) {
    Faults faults;
    const OptionValues read = read_options(
        all, {"--workers=tow", "--module=maybe", std::string("--nodes=") + bad, "--tee=3", "k=v"},
        faults);
    EXPECT_THAT(
        faults.messages(),
        ElementsAre("--workers: expected one of one, two, got 'tow'; did you mean 'two'?",
                    std::string("--nodes: expected a number from 1 to 4, got '") + bad + "'",
                    "--module: expected true or false, got 'maybe'"));
    EXPECT_THAT(read.values, ElementsAre(Pair("tee", ElementsAre("3"))));
    EXPECT_THAT(read.remaining, ElementsAre("k=v"));
  }
}

}  // namespace
}  // namespace syncbn::config::test
