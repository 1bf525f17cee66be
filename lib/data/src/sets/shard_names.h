#pragma once

#include <string>
#include <vector>

namespace syncbn::data::detail {

/// A pattern with its braces spelled out, as webdataset and shells do: "a-{08..10}.tar" is
/// a-08.tar, a-09.tar and a-10.tar, "{a,b}.tar" is a.tar and b.tar.
/// @throws base::UserError for braces that are not closed, or a range that is none.
std::vector<std::string> expand_braces(const std::string& pattern);

}  // namespace syncbn::data::detail
