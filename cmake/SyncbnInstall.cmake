# Installation and the CMake package for other programs; filled in with the consumer example.
