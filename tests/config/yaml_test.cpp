#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/config/yaml.h>

#include "support/temp_folder.h"
#include "support/thrown.h"

namespace syncbn::config {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string error_of(const std::string& text) {
  return syncbn::test::message_of<base::UserError>([&] { parse_yaml(text, "a.yaml"); });
}

TEST(YamlTest, RemembersWhereKeysAndValuesStand) {
  const Value value = parse_yaml("a: 1\nb:\n  c: [2, x]\n", "a.yaml");
  ASSERT_EQ(value.members.size(), 2u);
  EXPECT_EQ(value.members[1].mark.str(), "a.yaml:2:1");
  const Value* c = value.find("b")->find("c");
  EXPECT_EQ(c->mark.str(), "a.yaml:3:6");
  EXPECT_EQ(c->list[1].mark.str(), "a.yaml:3:10");
}

TEST(YamlTest, TellsQuotedTextFromPlain) {
  const Value value = parse_yaml("a: \"1\"\nb: 1\nc: |\n  1\nd: ''\n", "a.yaml");
  EXPECT_TRUE(value.find("a")->quoted);
  EXPECT_FALSE(value.find("b")->quoted);
  EXPECT_TRUE(value.find("c")->quoted);
  EXPECT_EQ(value.find("d")->kind, Value::Kind::kScalar);
}

TEST(YamlTest, ReadsEmptyTextAndNullsAsNothing) {
  EXPECT_EQ(parse_yaml("", "a.yaml").kind, Value::Kind::kNull);
  EXPECT_EQ(parse_yaml("", "a.yaml").mark.str(), "a.yaml");
  EXPECT_EQ(parse_yaml("# nothing\n", "a.yaml").kind, Value::Kind::kNull);
  const Value value = parse_yaml("a:\nb: ~\nc: null\n", "a.yaml");
  for (const char* key : {"a", "b", "c"}) EXPECT_EQ(value.find(key)->kind, Value::Kind::kNull);
}

TEST(YamlTest, SaysLineAndColumnOfASyntaxError) {
  EXPECT_THAT(error_of("a: 1\nb: [1, 2\nc: 3\n"), StartsWith("a.yaml:3:"));
  EXPECT_THAT(error_of("a: 1\nb: [1, 2\nc: 3\n"), HasSubstr("YAML syntax"));
  EXPECT_THAT(error_of("a: {b: 1\n"), StartsWith("a.yaml:2:"));
  EXPECT_THAT(error_of("\ta: 1\n"), StartsWith("a.yaml:1:"));
  EXPECT_THAT(error_of("a: *nowhere\n"), StartsWith("a.yaml:1:"));
}

TEST(YamlTest, TellsWhatIsProbablyWrongWithTheSyntax) {
  for (const char* text : {"\ta: 1\n", "a:\n\tb: 1\n", "a:\n  b: 1\n \tc: 2\n", "a:\n\t- 1\n"}) {
    EXPECT_THAT(error_of(text),
                HasSubstr("; a tab indents this line, where YAML allows only spaces"))
        << text;
  }
  EXPECT_THAT(error_of("a: {b: ${c}, d: 1}\n"),
              HasSubstr("; between brackets a reference needs quotes: \"${...}\""));
}

TEST(YamlTest, AdvisesWhatAValueNeeds) {
  EXPECT_THAT(error_of("a: b: c\n"), HasSubstr("; every ':' after a key needs a blank behind it"));
  EXPECT_THAT(error_of("a:1\nb: 2\n"), HasSubstr("; every ':' after a key needs a blank"));
  EXPECT_THAT(error_of("a:\n  b: 1\n c: 2\n"), HasSubstr("begin in the same column"));
  EXPECT_THAT(error_of("a: @b\n"), HasSubstr("begins with this character needs quotes"));
}

TEST(YamlTest, RefusesAQuoteThatIsNotClosed) {
  for (const std::string text :
       {"a: 1\nb: \"x\nc: 3\n", "a: 1\nb: 'x''\nc: 3\n", "a: 1\nb: \"x\\\"\n", "a: 1\nb: &x \"x\n",
        "\xef\xbb\xbf\na: 1\nb: 'x"}) {
    EXPECT_THAT(error_of(text), ::testing::EndsWith("this quote is not closed")) << text;
    EXPECT_THAT(error_of(text), StartsWith("a.yaml:")) << text;
  }
  for (const std::string text :
       {"a: \"x\n  y\"\n", "a: 'x''y'\n", "a: |\n  \"x\n", "\"a\": 1\n", "a: &x 'y'\nb: *x\n",
        "ä: \"x\"\nb: ['y', {c: \"z\"}]\n", "a: \"x\"\r\nb: 'y'\r\n"}) {
    EXPECT_NO_THROW(parse_yaml(text, "a.yaml")) << text;
  }
}

TEST(YamlTest, ReadsByteOrderMarksAndRefusesBinaryFiles) {
  using namespace std::string_literals;
  EXPECT_EQ(parse_yaml("\xef\xbb\xbf"
                       "a: 1\n",
                       "a.yaml")
                .find("a")
                ->mark.str(),
            "a.yaml:1:4");
  EXPECT_EQ(parse_yaml("\xff\xfe"
                       "a\0:\0 \0'\0x\0'\0\n\0"s,
                       "a.yaml")
                .find("a")
                ->scalar,
            "x");
  EXPECT_EQ(error_of("\x1f\x8b\0\0a: 1\n"s),
            "a.yaml: this is not YAML: it contains bytes that are 0");
}

TEST(YamlTest, RefusesAKeyWrittenTwice) {
  EXPECT_EQ(error_of("a: 1\nb: 2\na: 3\n"), "a.yaml:3:1: the key 'a' is already set at line 1");
  EXPECT_EQ(error_of("s:\n  a: 1\n  a: 1\n"), "a.yaml:3:3: the key 'a' is already set at line 2");
}

TEST(YamlTest, RefusesKeysThatAreNotText) {
  EXPECT_EQ(error_of("[1, 2]: 3\n"), "a.yaml:1:1: a key must be plain text");
}

TEST(YamlTest, RefusesASecondDocument) {
  EXPECT_THAT(error_of("a: 1\n---\nb: 1\n"), HasSubstr("a second document"));
}

TEST(YamlTest, ResolvesAnchorsAndMergeKeys) {
  const Value value = parse_yaml(
      "base: &base {lr: 1, momentum: 2}\n"
      "other:\n  <<: *base\n  lr: 3\n"
      "same: *base\n",
      "a.yaml");
  EXPECT_EQ(value.find("other")->find("lr")->scalar, "3");
  EXPECT_EQ(value.find("other")->find("momentum")->scalar, "2");
  EXPECT_EQ(value.find("other")->members.size(), 2u);
  EXPECT_EQ(value.find("same")->find("lr")->scalar, "1");
}

TEST(YamlTest, RefusesAliasesThatExplode) {
  std::string text = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n";
  for (int i = 1; i < 9; ++i) {
    text += fmt::format("a{0}: &a{0} [*a{1}, *a{1}, *a{1}, *a{1}, *a{1}, *a{1}]\n", i, i - 1);
  }
  EXPECT_THAT(error_of(text), HasSubstr("too large"));
}

TEST(YamlTest, RefusesDeepNesting) {
  for (const char* bracket : {"[", "{a: ", "- "}) {
    std::string text;
    for (int i = 0; i < 100'000; ++i) text += bracket;
    EXPECT_THAT(error_of(text), HasSubstr("nested too deep")) << bracket;
  }
}

// Refused before yaml-cpp makes nodes of the values, which would take 54 MiB.
TEST(YamlTest, RefusesManyValues) {
  for (const char* value : {"a,", "1,", "*x,"}) {
    std::string text = "x: &x 1\ny: {";
    for (int i = 0; i < 50'000; ++i) text += value;
    EXPECT_THAT(error_of(text + "}"), HasSubstr("too large")) << value;
  }
}

TEST(YamlTest, RefusesLargeFiles) {
  const syncbn::test::TempFolder folder;
  const auto path = folder / "big.yaml";
  base::write_file_atomically(path, "a: 1 #" + std::string(1 << 20, 'x'));
  EXPECT_THAT(syncbn::test::message_of<base::UserError>([&] { load_yaml(path); }),
              HasSubstr("big.yaml is larger than 131.1 kB"));
  EXPECT_THROW(load_yaml("/dev/zero"), base::UserError);
}

TEST(YamlTest, NamesAFileThatIsNotThere) {
  EXPECT_THAT(syncbn::test::message_of<base::UserError>([] { load_yaml("/nowhere/at/all.yaml"); }),
              AllOf(HasSubstr("/nowhere/at/all.yaml"), HasSubstr("No such file")));
}

TEST(YamlTest, ReadsAFileAndNamesItInMarks) {
  const syncbn::test::TempFolder folder;
  const auto path = folder / "b.yaml";
  base::write_file_atomically(path, "a: 1\n");
  const Value value = load_yaml(path);
  EXPECT_EQ(value.find("a")->mark.str(), path.string() + ":1:4");
}

TEST(YamlTest, WritesWhatItReadsBack) {
  const std::string text =
      "seed: 0\n"
      "name: digits\n"
      "path: \"a b: c#\"\n"
      "number_as_text: \"12\"\n"
      "word: \"yes\"\n"
      "empty: \"\"\n"
      "control: \"a\\nb\\x01\\\"\\\\\"\n"
      "nothing: null\n"
      "list: [1, two, [3, \"4\"], {a: 1}]\n"
      "none: {}\n"
      "section:\n"
      "  type: sgd\n"
      "  deeper:\n"
      "    lr: 0.1\n";
  EXPECT_EQ(to_yaml(parse_yaml(text, "a.yaml")), text);
}

TEST(YamlTest, WritesPlainTextInQuotesWhereItWouldBeReadAsSomethingElse) {
  for (const auto& [text, written] : {
           std::pair{"a: b c\n\n  d\n", "a: \"b c\\nd\"\n"},
           std::pair{"a:\n  - s-{0..9}.tar\n  - x, y\n  - layer?.*\n  - v w\n",
                     "a: [\"s-{0..9}.tar\", \"x, y\", \"layer?.*\", v w]\n"},
           std::pair{"a: s-{0..9}.tar\nb: ?z\n", "a: s-{0..9}.tar\nb: ?z\n"},
           std::pair{"a: [!x, !y \"b: c\", !!int 1]\n", "a: [\"\", \"b: c\", 1]\n"},
       }) {
    EXPECT_EQ(to_yaml(parse_yaml(text, "a.yaml")), written);
    EXPECT_EQ(to_yaml(parse_yaml(written, "a.yaml")), written);
  }
}

TEST(YamlTest, KeepsBytesThatAreNotUtf8) {
  // For example in a path.
  const std::string text = "path: \"/data/\xe9\xff\"\n";
  EXPECT_EQ(parse_yaml(text, "a.yaml").find("path")->scalar, "/data/\xe9\xff");
  EXPECT_EQ(to_yaml(parse_yaml(text, "a.yaml")), text);
}

TEST(YamlTest, ATypeAloneIsASectionWithThisType) {
  const auto loss = [](const char* text) { return parse_yaml(text, "x"); };
  EXPECT_THAT(changes(loss("loss: bce"), loss("loss: {type: bce}")), ::testing::IsEmpty());
  const auto other = changes(loss("loss: bce"), loss("loss: {type: cross_entropy}"));
  ASSERT_EQ(other.size(), 1U);
  EXPECT_EQ(other[0].path, "loss.type");
}

TEST(YamlTest, FindsTheKeysThatChanged) {
  const auto found =
      changes(parse_yaml("a: 1\nb: {c: [1, 2], d: x, gone: 1}\ne: null\nf: {g: 1}\n", "before"),
              parse_yaml("a: 1\nb: {c: [1, 3], d: x, new: 1}\ne: 2\nf: none\n", "after"));
  std::vector<std::string> texts;
  texts.reserve(found.size());
  for (const Change& change : found) {
    texts.push_back(fmt::format("{}: {} -> {}", change.path, change.before, change.after));
  }
  EXPECT_THAT(texts,
              ::testing::ElementsAre("b.c: [1, 2] -> [1, 3]", "e: null -> 2", "f: {g: 1} -> none"));
}

TEST(YamlTest, WritesTextThatLooksLikeSomethingElseInQuotes) {
  for (const char* text : {"true", "Null", "no", "1e3", "~", "- a", "a: b", "", " x", "*a", "#"}) {
    Value value = Value::of_map();
    value.set("key", Value::of_scalar(text, /*quoted=*/true));
    const Value back = parse_yaml(to_yaml(value), "a.yaml");
    ASSERT_EQ(back.find("key")->kind, Value::Kind::kScalar) << text;
    EXPECT_EQ(back.find("key")->scalar, text);
    EXPECT_TRUE(back.find("key")->quoted) << text;
  }
}

}  // namespace
}  // namespace syncbn::config
