# Writes a source file that defines the texts of files as string constants.
#   cmake -D OUT=assets.cpp -D HEADER=report/assets.h -D NAMESPACE=a::b -D FILES=kName=path;... -P embed_files.cmake
set(source "#include \"${HEADER}\"\n\nnamespace ${NAMESPACE} {\n")
foreach(pair ${FILES})
  string(REGEX MATCH "^([^=]+)=(.+)$" matched "${pair}")
  set(name "${CMAKE_MATCH_1}")
  file(READ "${CMAKE_MATCH_2}" text)
  string(APPEND source "\nconst std::string_view ${name} = R\"embedded(${text})embedded\";\n")
endforeach()
file(WRITE "${OUT}" "${source}\n}  // namespace ${NAMESPACE}\n")
