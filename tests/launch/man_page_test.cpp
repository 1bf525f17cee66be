// The manual page, as shown by groff.
#include <gmock/gmock.h>

#include <regex>
#include <set>

#include "launch/launcher.h"
#include "support/skip.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

std::string page() {
  const auto result = run_program({kLauncher, "--man"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return result.out;
}

/// The page as groff formats it, without bold and underlined letters.
ProgramResult shown() {
  TempFolder folder;
  return run_program({"groff", "-man", "-ww", "-Tascii", "-P-c", "-P-b", "-P-o", "-P-u",
                      folder.write("page.1", page())});
}

bool has_groff() {
  return run_program({"sh", "-c", "command -v groff"}).exit_code == 0;
}

std::set<std::string> options_in(const std::string& text, const std::string& before) {
  std::set<std::string> names;
  const std::regex name("(^|\n)" + before + "(-[a-zA-Z],? ?)?(--[a-z_]+)");
  for (std::sregex_iterator match(text.begin(), text.end(), name), end; match != end; ++match) {
    names.insert((*match)[3]);
  }
  return names;
}

TEST(ManPageTest, HasNoWarnings) {
  SYNCBN_SKIP_UNLESS(has_groff(), "groff");
  const auto result = shown();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
}

TEST(ManPageTest, TellsEveryOptionOfTheHelp) {
  SYNCBN_SKIP_UNLESS(has_groff(), "groff");
  const auto helped = options_in(run_program({kLauncher, "--help", "all"}).out, "  ");
  EXPECT_THAT(helped, IsSupersetOf({"--nnodes", "--redirects", "--man"}));
  EXPECT_EQ(options_in(shown().out, " {7}"), helped);
}

TEST(ManPageTest, HasItsSectionsAndKeepsWords) {
  SYNCBN_SKIP_UNLESS(has_groff(), "groff");
  const std::string text = shown().out;
  EXPECT_THAT(text, AllOf(HasSubstr("\nNAME\n       syncbn-launch - start the workers"),
                          HasSubstr("\nSYNOPSIS\n"), HasSubstr("\nOPTIONS\n"),
                          HasSubstr("\nEXIT STATUS\n"), HasSubstr("\n   Nodes\n"),
                          HasSubstr("Environment: PET_NPROC_PER_NODE."), HasSubstr("128+N  ")));
  EXPECT_THAT(text, AllOf(HasSubstr("$local_rank and ${local_rank}"), HasSubstr("LOCAL_RANK,")));
}

}  // namespace
}  // namespace syncbn::test
