#include <syncbn/launch/options.h>

#include <gmock/gmock.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace syncbn::launch {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

LaunchOptions parse(std::vector<const char*> words) {
  words.insert(words.begin(), "syncbn-launch");
  const auto options = parse_options(static_cast<int>(words.size()), words.data());
  if (!options) throw base::InternalError("no options");
  return *options;
}

std::string error_of(const std::vector<const char*>& words) {
  try {
    parse(words);
  } catch (const base::UserError& error) {
    return error.what();
  }
  return "no error";
}

TEST(LaunchOptionsTest, HasTorchrunsDefaults) {
  const LaunchOptions options = parse({"prog"});
  EXPECT_EQ(options.nproc_per_node, 1);
  EXPECT_EQ(options.nnodes, 1);
  EXPECT_EQ(options.node_rank, 0);
  EXPECT_EQ(options.role, "default");
  EXPECT_FALSE(options.master_port);
  EXPECT_FALSE(options.standalone);
  EXPECT_TRUE(options.prefix);
  EXPECT_EQ(options.shutdown_timeout, std::chrono::seconds(30));
}

TEST(LaunchOptionsTest, TakesDashesUnderscoresPrefixesAndBothWaysOfGivingAValue) {
  EXPECT_EQ(parse({"--nproc_per_node=4", "prog"}).nproc_per_node, 4);
  EXPECT_EQ(parse({"--nproc-per-node", "4", "prog"}).nproc_per_node, 4);
  EXPECT_EQ(parse({"--nproc", "4", "prog"}).nproc_per_node, 4);
  EXPECT_EQ(parse({"--master-p", "1234", "prog"}).master_port, 1234);
  EXPECT_EQ(parse({"--shutdown-timeout=0.25", "prog"}).shutdown_timeout,
            std::chrono::milliseconds(250));
  EXPECT_TRUE(parse({"--stand", "prog"}).standalone);
}

TEST(LaunchOptionsTest, LeavesEverythingAfterTheProgramAlone) {
  EXPECT_THAT(
      parse({"--nproc_per_node=2", "prog", "--help", "--nproc_per_node", "7", "-x", "--", ""})
          .program,
      ElementsAre("prog", "--help", "--nproc_per_node", "7", "-x", "--", ""));
  EXPECT_THAT(parse({"--standalone", "--", "--odd-name", "a"}).program,
              ElementsAre("--odd-name", "a"));
}

TEST(LaunchOptionsTest, ReadsTheEnvironmentAndPrefersTheCommandLine) {
  ::setenv("PET_NPROC_PER_NODE", "3", 1);
  const int from_environment = parse({"prog"}).nproc_per_node;
  const int from_command_line = parse({"--nproc_per_node=2", "prog"}).nproc_per_node;
  ::unsetenv("PET_NPROC_PER_NODE");
  EXPECT_EQ(from_environment, 3);
  EXPECT_EQ(from_command_line, 2);
}

TEST(LaunchOptionsTest, NamesTheEnvironmentVariableThatIsWrong) {
  ::setenv("PET_NNODES", "many", 1);
  const std::string error = error_of({"prog"});
  ::unsetenv("PET_NNODES");
  EXPECT_EQ(error,
            "environment variable PET_NNODES, read as --nnodes: expected a number from 1 to 65536, "
            "got 'many'");
}

TEST(LaunchOptionsTest, CountsGpusAsCudaWould) {
  ::setenv("CUDA_VISIBLE_DEVICES", "0,2,GPU-abc,-1,3", 1);
  const int some = parse({"--nproc_per_node=gpu", "prog"}).nproc_per_node;
  const int automatic = parse({"--nproc_per_node=auto", "prog"}).nproc_per_node;
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  const std::string none = error_of({"--nproc_per_node=gpu", "prog"});
  const int cpu = parse({"--nproc_per_node=cpu", "prog"}).nproc_per_node;
  const int automatic_without = parse({"--nproc_per_node=auto", "prog"}).nproc_per_node;
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_EQ(some, 3);
  EXPECT_EQ(automatic, 3);
  EXPECT_THAT(none, HasSubstr("no GPU is visible"));
  EXPECT_GE(cpu, 1);
  EXPECT_EQ(automatic_without, cpu);
}

TEST(LaunchOptionsTest, NamesWhatIsWrong) {
  for (const char* bad : {"0", "-1", "x", "1.5", "99999"}) {
    EXPECT_THAT(error_of({"--nproc_per_node", bad, "prog"}),
                AllOf(StartsWith(std::string("--nproc_per_node=") + bad + ":"), HasSubstr("gpu")));
  }
  EXPECT_EQ(error_of({"--nproc_per_node=", "prog"}), "option --nproc_per_node needs a value");
  EXPECT_THAT(error_of({"--nproc_per_nod3=1", "prog"}), HasSubstr("did you mean 'nproc_per_node'"));
  EXPECT_THAT(error_of({"--no", "prog"}),
              AllOf(HasSubstr("ambiguous"), HasSubstr("--node_rank"), HasSubstr("--no_python")));
  EXPECT_THAT(error_of({"-z", "prog"}), HasSubstr("unknown option -z"));
  EXPECT_THAT(error_of({"--nnodes"}), HasSubstr("--nnodes needs a value"));
  EXPECT_EQ(error_of({"--nnodes=0", "prog"}),
            "--nnodes: expected a number from 1 to 65536, got '0'");
  EXPECT_THAT(error_of({"--shutdown_timeout=nan", "prog"}), HasSubstr("got 'nan'"));
  EXPECT_THAT(error_of({"--standalone=maybe", "prog"}),
              AllOf(HasSubstr("--standalone"), HasSubstr("maybe")));
  EXPECT_THAT(error_of({"--master_port=70000", "prog"}), HasSubstr("--master_port"));
  EXPECT_THAT(error_of({"--prefix=maybe", "prog"}), HasSubstr("--prefix"));
  EXPECT_THAT(error_of({}), HasSubstr("no program given"));
}

TEST(LaunchOptionsTest, ChecksThatTheOptionsOfSeveralNodesFitTogether) {
  EXPECT_THAT(error_of({"--standalone", "--nnodes=2", "--node_rank=0", "prog"}),
              HasSubstr("--standalone"));
  EXPECT_THAT(error_of({"--nnodes=2", "--master_addr=a", "prog"}), HasSubstr("needs --node_rank"));
  EXPECT_THAT(error_of({"--nnodes=2", "--node_rank=0", "prog"}), HasSubstr("needs --master_addr"));
  EXPECT_THAT(error_of({"--nnodes=2", "--node_rank=2", "--master_addr=a", "prog"}),
              HasSubstr("--node_rank=2 is not below --nnodes=2"));
  EXPECT_THAT(
      error_of({"--nnodes=2", "--node_rank=0", "--master_addr=a", "--master_port=0", "prog"}),
      HasSubstr("--master_port=0"));
  EXPECT_EQ(parse({"--nnodes=2", "--node_rank=1", "--master_addr=a", "prog"}).node_rank, 1);
}

TEST(LaunchOptionsTest, HelpIsWordForWordTheGoldenFile) {
  ::testing::internal::CaptureStdout();
  const char* argv[] = {"syncbn-launch", "--help"};
  EXPECT_FALSE(parse_options(2, argv));
  EXPECT_EQ(::testing::internal::GetCapturedStdout(),
            base::read_file(SYNCBN_SOURCE_DIR "/tests/launch/help.txt"))
      << "if the change is meant: syncbn-launch --help > tests/launch/help.txt";
}

}  // namespace
}  // namespace syncbn::launch
