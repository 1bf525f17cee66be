// The manual page that help2man has made, as shown by groff.
#include <gmock/gmock.h>

#include <filesystem>
#include <regex>
#include <set>

#include "launch/launcher.h"
#include "support/skip.h"

namespace syncbn::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

std::set<std::string> options_in(const std::string& text, const std::string& before) {
  std::set<std::string> names;
  const std::regex name("(^|\n)" + before + "(-[a-zA-Z],? ?)?(--[a-z_]+)");
  for (std::sregex_iterator match(text.begin(), text.end(), name), end; match != end; ++match) {
    names.insert((*match)[3]);
  }
  return names;
}

TEST(ManPageTest, TellsEveryOptionOfTheHelp) {
  const std::string page = SYNCBN_BIN_DIR "/../apps/launch/pages/syncbn-launch.1";
  SYNCBN_SKIP_UNLESS(std::filesystem::exists(page), "help2man");
  SYNCBN_SKIP_UNLESS(run_program({"sh", "-c", "command -v groff"}).exit_code == 0, "groff");
  // Without bold and underlined letters.
  const auto shown =
      run_program({"groff", "-man", "-ww", "-Tascii", "-P-c", "-P-b", "-P-o", "-P-u", page});
  EXPECT_EQ(shown.exit_code, 0);
  EXPECT_EQ(shown.err, "");
  EXPECT_THAT(shown.out, AllOf(HasSubstr("\nNAME\n       syncbn-launch - start the workers"),
                               HasSubstr("\nSYNOPSIS\n"), HasSubstr("\n   Nodes:\n"),
                               HasSubstr("\nEXIT STATUS\n"), HasSubstr("\nEXAMPLES\n")));
  const auto helped = options_in(run_program({kLauncher, "--help", "all"}).out, "  ");
  EXPECT_THAT(helped, IsSupersetOf({"--nnodes", "--redirects", "--completion"}));
  EXPECT_EQ(options_in(shown.out, " {7}"), helped);
}

}  // namespace
}  // namespace syncbn::test
