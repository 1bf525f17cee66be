#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace syncbn::train {

/// A page about a run, from the files in its folder: curves, results by class, pictures,
/// configuration, environment. Below 3 MB: curves are thinned out, pictures chosen and made
/// smaller. The run may be training meanwhile.
/// @throws base::UserError for a folder that holds no run, or the run of a newer version.
std::string report_page(const std::filesystem::path& folder);

/// Writes RUN/report.html. @throws also base::UnavailableError if the disk is full.
/// @return its path
std::filesystem::path write_report(const std::filesystem::path& folder);

/// `train report RUN...`. @param args without "report"
int report_command(const std::vector<std::string>& args);

/// `train compare RUN... [--html FILE]`: prints a table of runs of one task, the best first, with
/// the keys in which they differ. Runs that differ only in their seeds are a line together, with
/// mean and standard deviation. With --html, also writes a page with their curves.
/// @param args without "compare"
/// @throws base::UserError for runs of different tasks, a folder that is given twice, and as
///   report_page() does.
int compare_command(const std::vector<std::string>& args);

}  // namespace syncbn::train
