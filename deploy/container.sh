#!/bin/sh
# Entry point of every container: take the role's credentials, then become the command.
#
# The sandbox starts as root with CAP_SYS_ADMIN for one mount. A container's /proc has masked parts, and the
# kernel lets nobody mount a /proc in a user namespace (each box does) while the only one in sight is masked.
# So a fresh one goes over it; then every privilege is dropped for good, before Python starts.
set -eu
if [ "$(id -u)" = 0 ]; then
  mount -t proc -o nosuid,nodev,noexec proc /proc
  exec setpriv --reuid headway --regid headway --clear-groups --bounding-set=-all --inh-caps=-all "$0" "$@"
fi
if [ -r "${HEADWAY_KEYS_DIR:-}/env" ]; then
  set -a
  . "$HEADWAY_KEYS_DIR/env"
  set +a
fi
exec "$@"
