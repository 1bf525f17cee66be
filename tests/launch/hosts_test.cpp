// The hosts of a job, their options, and the variables that are exported to them.
#include "options/hosts.h"

#include <gmock/gmock.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>

#include "common/words.h"
#include "support/environment_guard.h"
#include "support/temp_folder.h"
#include "support/thrown.h"

namespace syncbn::launch {
namespace {

using test::message_of;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Optional;
using ::testing::Pair;

/// Each host as "user@name=slots".
std::vector<std::string> in_words(const std::vector<Host>& hosts) {
  std::vector<std::string> words;
  words.reserve(hosts.size());
  for (const Host& host : hosts) {
    words.push_back(host.full_name() + "=" + std::to_string(host.slots));
  }
  return words;
}

TEST(HostsTest, AListNamesHostsAndSlots) {
  EXPECT_THAT(in_words(read_host_list("a:4,b,me@c.example:2,[::1]:3,::2,me@x@d")),
              ElementsAre("a=4", "b=0", "me@c.example=2", "::1=3", "::2=0", "me@x@d=0"));
}

TEST(HostsTest, WhatIsNoHostIsNamed) {
  for (const char* text : {"a,,b", "a:", "a:x", "-oProxyCommand=x", "a b", "$(x)", "@a", "-l@a",
                           "a;b", "a:1:2", "[a]:1", "a\nb"}) {
    EXPECT_THAT(message_of<base::UserError>([&] { read_host_list(text); }),
                AllOf(HasSubstr("--hosts="), HasSubstr("is not a host")))
        << text;
  }
  EXPECT_THAT(message_of<base::UserError>([] { read_host_list("a:0"); }),
              HasSubstr("a:0 needs a number of workers"));
  EXPECT_THAT(message_of<base::UserError>([] { read_host_list("a:4097"); }),
              HasSubstr("from 1 to 4096"));
}

TEST(HostsTest, ARepeatedHostHasTheSumOfItsSlots) {
  EXPECT_THAT(in_words(read_host_list("a:1,b,a:2")), ElementsAre("a=3", "b=1"));
  EXPECT_THAT(in_words(read_host_list("a,a")), ElementsAre("a=2"));
  EXPECT_THAT(in_words(read_host_list("b,a:2,b,a,c")), ElementsAre("b=2", "a=3", "c=1"));
  EXPECT_THAT(in_words(read_host_list("me@a,a,me@a")), ElementsAre("me@a=2", "a=1"));
  EXPECT_THAT(message_of<base::UserError>([] { read_host_list("a:4096,a"); }),
              HasSubstr("a needs a number of workers (slots) from 1 to 4096"));
}

TEST(HostsTest, AFileHasAHostALine) {
  const test::TempFolder folder;
  const auto file =
      folder.write("hosts", "# all of them\n\na slots=4  # the new one\n\tb:2\r\nc\n");
  EXPECT_THAT(in_words(read_host_file(file)), ElementsAre("a=4", "b=2", "c=0"));
}

TEST(HostsTest, FilesOfSchedulersAndOfMpirunAreRead) {
  const test::TempFolder folder;
  const auto read = [&](const std::string& text) {
    return in_words(read_host_file(folder.write("hosts", text)));
  };
  EXPECT_THAT(read("a\na\nb\nb\nb\nc\n"), ElementsAre("a=2", "b=3", "c=1")) << "of PBS";
  EXPECT_THAT(read("a slots=2 max_slots=4\nb max-slots=8 slots = 3\nc slots =1\n"),
              ElementsAre("a=2", "b=3", "c=1"))
      << "of Open MPI";
  EXPECT_THAT(read("a cpus=2 slots_max=4\nb slots-max = 8 count = 3\nc cpu=1  # slots=7\n"),
              ElementsAre("a=2", "b=3", "c=1"))
      << "of Open MPI, with its other names";
  EXPECT_THAT(read("[::1]:3 max_slots=4\n::2 slots=2\nme@[::1]\nme@[::1]\n"),
              ElementsAre("::1=3", "::2=2", "me@::1=2"))
      << "with IPv6 addresses";
  EXPECT_THAT(read("\ufeffa\r\nb slots=2\r\n"), ElementsAre("a=0", "b=2")) << "of Windows";
  EXPECT_THAT(read("a slots=2\nb\na slots=2\n"), ElementsAre("a=4", "b=1"));
}

TEST(HostsTest, AFaultInAFileIsNamedByItsLineAsFarAsItCanBeShown) {
  const test::TempFolder folder;
  const std::vector<std::pair<std::string, std::string>> faults{
      {"a\nb slots=x\n", "hosts:2: b needs a number of workers"},
      {"a\n\nb max=3\n", "hosts:3: expected HOST or HOST slots=N"},
      {"a:1 slots=1\n", "hosts:1: a:1 has its number of workers twice"},
      {"a slots=1 slots=2\n", "a has its number of workers twice"},
      {"a slots\n", "hosts:1: expected HOST or HOST slots=N"},
      {"a slots=\n", "hosts:1: a needs a number of workers"},
      {"a 4\n", "expected HOST or HOST slots=N, got 'a 4'"},
      {"a:4096\nb\na:1\n", "a needs a number of workers"},
      {"# nobody\n", "names no host"},
      {"a\n\ufeffb\n", "hosts:2: '\\xef\\xbb\\xbfb' is not a host: exp"},
      {std::string("a\nb\0c\n", 6), "hosts:2: 'b\\x00c' is not a host: exp"},
      {"a \x1b[2J\n", "got 'a \\x1b[2J'"},
      {std::string(100'000, '$'), std::string(80, '$') + "…' is not a host"}};
  const auto error = [](const std::string& file) {
    return message_of<base::UserError>([&] { read_host_file(file); });
  };
  for (const auto& [text, message] : faults) {
    EXPECT_THAT(error(folder.write("hosts", text)), HasSubstr(message));
  }
  EXPECT_THAT(error("/nonexistent/hosts"), HasSubstr("/nonexistent/hosts"));
  EXPECT_THAT(error("/dev/zero"), HasSubstr("/dev/zero is larger than 1.0 MB"));
}

TEST(WordsTest, AreSplitAsAShellDoes) {
  EXPECT_THAT(shell_words("-o  'a b' \"c 'd\" e\\ f ''"),
              Optional(ElementsAre("-o", "a b", "c 'd", "e f", "")));
  EXPECT_THAT(shell_words(" $(x) `y` *"), Optional(ElementsAre("$(x)", "`y`", "*")));
  EXPECT_EQ(shell_words("'a"), std::nullopt);
}

TEST(WordsTest, AreQuotedForAShellWhereNeedBe) {
  EXPECT_EQ(shell_quoted({"a", "", "b c", "it's", "$(x)", "--k=v"}),
            R"(a '' 'b c' 'it'\''s' '$(x)' --k=v)");
  EXPECT_EQ(base::in_single_quotes("a"), "'a'");
}

TEST(WordsTest, ValuesThatAreNamedLikeSecretsAreHidden) {
  EXPECT_THAT(without_secrets({"train.py", "--hf-token=a", "--password", "b", "API_KEY=c",
                               "--aws.secret_access_key=d", "+login.Token=e", "--apikey=f=g"}),
              ElementsAre("train.py", "--hf-token=***", "--password", "***", "API_KEY=***",
                          "--aws.secret_access_key=***", "+login.Token=***", "--apikey=***"));
  EXPECT_THAT(without_secrets({"PGPASSWORD=a", "--accessToken=b", "--passphrase", "c",
                               "a://h:1/b,postgres://me:d@host/x", "http://host:80/a@b"}),
              ElementsAre("PGPASSWORD=***", "--accessToken=***", "--passphrase", "***",
                          "a://h:1/b,postgres://me:***@host/x", "http://host:80/a@b"));
  const std::vector<std::string> others{"token",    "--token_file=a",  "--max_tokens=3",
                                        "--secret", "--tokenizer=gpt", "--password"};
  EXPECT_EQ(without_secrets(others), others);
}

TEST(ExportsTest, ThePatternThatFitsLastCounts) {
  const test::Environment here({{"A_X", "1"},
                                {"A_SECRET", "1"},
                                {"BB", "1"},
                                {"XA_", "1"},
                                {"B", "2"},
                                {"NCCL_DEBUG", "3"},
                                {"NCCL_SECRET", "1"},
                                {"AWS_SECRET", "1"},
                                {"LD_PRELOAD_X", "1"}});
  const Variables exported = exported_variables({"A_*", "!A_SECRET", "B", "!NCCL_SECRET"});
  EXPECT_THAT(exported, IsSupersetOf({Pair("A_X", "1"), Pair("B", "2"), Pair("NCCL_DEBUG", "3")}));
  for (const char* name : {"A_SECRET", "BB", "XA_", "NCCL_SECRET", "AWS_SECRET", "LD_PRELOAD_X"}) {
    EXPECT_FALSE(exported.contains(name)) << name;
  }
}

TEST(ExportsTest, TheDocumentListsThem) {
  const std::string text = base::read_file(SYNCBN_SOURCE_DIR "/docs/ssh.md");
  for (const std::string pattern : kDefaultExports) {
    EXPECT_THAT(text, HasSubstr("`" + pattern + "`"));
  }
}

}  // namespace
}  // namespace syncbn::launch
