#include <syncbn/base/shell.h>
#include <syncbn/base/text.h>
#include <sys/wait.h>

#include <algorithm>
#include <cctype>
#include <cstdio>

namespace syncbn::base {
namespace {

bool needs_no_quotes(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
         std::string_view("_-+=./:,@%").find(c) != std::string_view::npos;
}

// Whether an option or a variable is named like a secret.
bool names_secret(std::string_view name) {
  std::string words = "_";
  for (const char c : name) {
    words += std::isalnum(static_cast<unsigned char>(c)) == 0
                 ? '_'
                 : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  words += '_';
  if (words.ends_with("_file_") || words.ends_with("_path_")) return false;
  // Ends of words: accessToken and PGPASSWORD are secrets, --tokenizer and --max_tokens are not.
  constexpr const char* kSecrets[] = {"token_",      "secret_",     "password_",    "passwd_",
                                      "passphrase_", "credential_", "credentials_", "pwd_",
                                      "api_key_",    "apikey_",     "access_key_",  "private_key_"};
  return std::ranges::any_of(
      kSecrets, [&](const char* secret) { return words.find(secret) != std::string::npos; });
}

constexpr const char* kHidden = "***";

// Hides the passwords of URLs: "postgres://user:password@host".
void hide_passwords_of_urls(std::string& word) {
  for (size_t at = word.find("://"); at != std::string::npos; at = word.find("://", at)) {
    at += 3;
    const size_t end = std::min(word.find_first_of("/ ,;'\"", at), word.size());
    const size_t host = std::string_view(word).substr(0, end).rfind('@');
    const size_t colon = word.find(':', at);
    if (host == std::string::npos || colon > host) continue;
    word.replace(colon + 1, host - colon - 1, kHidden);
  }
}

}  // namespace

std::string in_single_quotes(std::string_view word) {
  std::string result = "'";
  for (const char c : word) {
    result += c == '\'' ? R"('\'')" : std::string(1, c);
  }
  return result + "'";
}

std::string shell_quoted(const std::vector<std::string>& words) {
  std::vector<std::string> quoted;
  quoted.reserve(words.size());
  for (const std::string& word : words) {
    const bool bare = !word.empty() && std::ranges::all_of(word, needs_no_quotes);
    quoted.push_back(bare ? word : in_single_quotes(word));
  }
  return join(quoted, " ");
}

std::pair<int, std::string> run_shell(const std::string& command) {
  std::string output;
  FILE* const pipe = ::popen(command.c_str(), "re");
  if (pipe == nullptr) return {-1, output};
  for (int c = 0; (c = std::fgetc(pipe)) != EOF;) output += static_cast<char>(c);
  if (output.ends_with('\n')) output.pop_back();
  const int status = ::pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, output};
}

std::vector<char*> argv_of(const std::vector<std::string>& words) {
  std::vector<char*> result;
  result.reserve(words.size() + 1);
  for (const std::string& word : words) result.push_back(const_cast<char*>(word.c_str()));
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> without_secrets(std::vector<std::string> words) {
  for (size_t i = 0; i < words.size(); ++i) {
    hide_passwords_of_urls(words[i]);
    const size_t end = words[i].find('=');
    if (!names_secret(std::string_view(words[i]).substr(0, end))) continue;
    if (end != std::string::npos) {
      words[i].replace(end + 1, std::string::npos, kHidden);
    } else if (words[i].starts_with("-") && i + 1 < words.size() &&
               !words[i + 1].starts_with("-")) {
      words[++i] = kHidden;
    }
  }
  return words;
}

}  // namespace syncbn::base
