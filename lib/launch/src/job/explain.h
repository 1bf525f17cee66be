#pragma once

#include <string>
#include <vector>

#include "job/flight_file.h"

namespace syncbn::launch {

/// Describes in words which ranks did not make which calls, and what the files lack.
/// @param files of the nodes of one job; not empty.
std::string explanation(const std::vector<FlightFile>& files);

/// `syncbn-launch explain [--save=FILE] [--torch=FOLDER] FILE...`: prints the explanation, and
/// writes the records to one file, or to a file per rank for torch's fr_trace. The process id of a
/// launcher on this machine, in place of the files, means the workers of all its nodes as they are
/// now.
/// @throws base::UserError if a file is not from syncbn-launch, or files are of different jobs.
void explain(const std::vector<std::string>& arguments);

}  // namespace syncbn::launch
