#pragma once

namespace syncbn::base {

/// The width of the terminal that stderr is, in columns; 80 where it does not tell, or is none.
int terminal_columns();

}  // namespace syncbn::base
