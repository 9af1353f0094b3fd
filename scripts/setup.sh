# Sourced by the other scripts: sets PYTHON to an interpreter that imports all that megagen needs.
# Installs only what is missing. Arguments are the extras of pyproject.toml to provide.
#
# In a virtual environment, and as root outside of one (a container), packages go into the interpreter that is there;
# otherwise into .venv, which also sees what the system has.

_find_python() {
    local candidate
    for candidate in "${PYTHON:-}" .venv/bin/python python3 python3.12 python3.11 python; do
        if [ -n "$candidate" ] && "$candidate" -c '
import sys
sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "megagen needs Python 3.11 or 3.12; none was found (set PYTHON to one)" >&2
    return 1
}

_installs_into_itself() {
    "$1" -c '
import os, pathlib, sys, sysconfig
in_environment = sys.prefix != sys.base_prefix or "CONDA_PREFIX" in os.environ
managed = pathlib.Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists()
sys.exit(not (in_environment or (os.getuid() == 0 and not managed)))'
}

PYTHON=$(_find_python)
if ! "$PYTHON" scripts/install_missing.py --check "$@"; then
    if ! _installs_into_itself "$PYTHON"; then
        "$PYTHON" -m venv --system-site-packages .venv
        PYTHON=.venv/bin/python
    fi
    "$PYTHON" scripts/install_missing.py "$@"
fi
export PYTHON
