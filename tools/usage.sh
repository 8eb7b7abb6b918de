# Sourced by the scripts.
# shellcheck shell=bash

# print_usage: prints the comment at the head of the script.
print_usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }

# answer_help [ARG ...]: prints the usage and stops if it is asked for.
answer_help() {
    case ${1:-} in -h | --help) print_usage && exit 0 ;; esac
}

# take_no_arguments [ARG ...]: stops if there are any, because a script that starts anyway would work for minutes.
take_no_arguments() {
    answer_help "$@"
    [ $# -eq 0 ] && return
    echo "error: $0 takes no arguments, and not '$1'; --help lists the variables that it reads" >&2
    exit 2
}

# count_cores: prints the number of cores that this process may use. nproc alone would print OMP_NUM_THREADS, if it is set.
count_cores() { env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc; }
