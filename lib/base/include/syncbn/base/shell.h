#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace syncbn::base {

/// Quotes a word for a shell, even if it needs no quotes.
std::string in_single_quotes(std::string_view word);

/// Joins words into a shell command, with quotes only where they are needed.
std::string shell_quoted(const std::vector<std::string>& words);

/// Runs a shell command and waits for its end.
/// @return the shell's exit code, or -1 if it did not start or a signal ended it; and the standard
///   output, without the end of the last line
std::pair<int, std::string> run_shell(const std::string& command);

/// The words as exec takes them. They must outlive the result.
std::vector<char*> argv_of(const std::vector<std::string>& words);

/// The words of a command line for a log. Replaces by *** the values of options and variables that
/// are named like secrets (token, password, secret, api_key), as in --hf_token=X, --password X and
/// API_KEY=X. Names of files stay, as in --token_file=X.
std::vector<std::string> without_secrets(std::vector<std::string> words);

}  // namespace syncbn::base
