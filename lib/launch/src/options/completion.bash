# The part of bash's completion that does not depend on the options; --completion bash prints it after
# _syncbn_launch_options, _syncbn_launch_kind and _syncbn_launch_letter.
#
# bash also splits words at = and :, so the script joins them again. It uses only builtins and works
# without bash-completion.

# The words before the cursor, and where each begins in COMP_WORDS.
_syncbn_launch_split() {
  local line=$COMP_LINE rest i
  words=() starts=()
  for ((i = 0; i <= COMP_CWORD; ++i)); do
    rest=${line#"${line%%[![:space:]]*}"}
    if ((i > 0)) && [[ $rest == "$line" ]]; then
      words[-1]+=${COMP_WORDS[i]}
    else
      words+=("${COMP_WORDS[i]}")
      starts+=("$i")
    fi
    line=${rest#"${COMP_WORDS[i]}"}
  done
}

# Sets name to an option in full, from what was typed: with dashes, a letter, an abbreviation.
_syncbn_launch_name() {
  local typed=${1%%=*} known
  name=
  _syncbn_launch_letter "$typed" && return
  typed=${typed#--}
  typed=--${typed//-/_}
  for known in $_syncbn_launch_options; do
    if [[ $known == "$typed" ]]; then
      name=$known
      return
    fi
    [[ $known != "$typed"* ]] || name=${name:-$known}
  done
}

_syncbn_launch_offer_options() {
  local offered=$_syncbn_launch_options
  # Whoever types dashes gets dashes.
  [[ ${1#--} != *-* ]] || offered=${offered//_/-}
  mapfile -t COMPREPLY < <(compgen -W "$offered" -- "$1")
}

# $1: the option; $2: the value so far; $3: what stands before it in the same word.
_syncbn_launch_offer_values() {
  local kind
  _syncbn_launch_kind "$1"
  case $kind in
    flag) mapfile -t COMPREPLY < <(compgen -W 'true false' -- "$2") ;;
    files) mapfile -t COMPREPLY < <(compgen -f -- "$2") ;;
    folders) mapfile -t COMPREPLY < <(compgen -d -- "$2") ;;
    topics\ *) [[ -n $3 ]] || mapfile -t COMPREPLY < <(compgen -W "${kind#topics }" -- "$2") ;;
    words\ *) mapfile -t COMPREPLY < <(compgen -W "${kind#words }" -- "$2") ;;
  esac
  [[ $kind != files && $kind != folders ]] || compopt -o filenames 2>/dev/null
  # Where = does not part words, all of the word is replaced.
  [[ -z $3 || $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${COMPREPLY[@]/#/$3}")
}

_syncbn_launch_offer_programs() {
  mapfile -t COMPREPLY < <(compgen -c -- "$1"; compgen -f -- "$1")
  compopt -o filenames 2>/dev/null
}

# As if the line began with the program, which is COMP_WORDS[$1].
_syncbn_launch_as_program() {
  local offset
  for offset in _comp_command_offset _command_offset; do
    declare -F "$offset" >/dev/null || continue
    "$offset" "$1"
    return
  done
  local i line=$COMP_LINE
  for ((i = 0; i < $1; ++i)); do
    line=${line#*"${COMP_WORDS[i]}"}
  done
  line=${line#"${line%%[![:space:]]*}"}
  local program=${COMP_WORDS[$1]} before=$((${#COMP_LINE} - ${#line}))
  COMP_LINE=$line
  COMP_POINT=$((COMP_POINT - before))
  COMP_WORDS=("${COMP_WORDS[@]:$1}")
  COMP_CWORD=$((COMP_CWORD - $1))
  local spec
  spec=$(complete -p "$program" 2>/dev/null || complete -p "${program##*/}" 2>/dev/null)
  if [[ $spec =~ \ -F\ ([^ ]+) ]]; then
    "${BASH_REMATCH[1]}" "$program" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
  else
    compopt -o bashdefault -o default 2>/dev/null
  fi
}

_syncbn_launch() {
  local words starts name kind word i=1 options_end=
  COMPREPLY=()
  _syncbn_launch_split
  local last=$((${#words[@]} - 1))
  local current=${words[last]}
  while ((i < last)); do
    word=${words[i]}
    [[ $word == -?* ]] || break
    ((++i))
    if [[ $word == -- ]]; then
      options_end=yes
      break
    fi
    _syncbn_launch_name "$word"
    _syncbn_launch_kind "$name"
    # The value is here, or there is none.
    if [[ $word == *=* || $word == -[!-]?* || $kind == flag ]]; then continue; fi
    if ((i == last)); then
      _syncbn_launch_offer_values "$name" "$current"
      return
    fi
    ((++i))
  done
  if ((i < last)); then
    _syncbn_launch_as_program "${starts[i]}"
  elif [[ -z $options_end && $current == --*=* ]]; then
    _syncbn_launch_name "$current"
    _syncbn_launch_offer_values "$name" "${current#*=}" "${current%%=*}="
  elif [[ -z $options_end && $current == -* ]]; then
    _syncbn_launch_offer_options "$current"
  else
    _syncbn_launch_offer_programs "$current"
  fi
}

complete -F _syncbn_launch syncbn-launch
