set -e
# A systemd that knows only the units of rnicd.
mkdir -p /run/systemd/system /usr/local/sbin
cat > /usr/local/sbin/systemctl <<'SCRIPT'
#!/bin/sh
echo "$*" >> /tmp/calls
case $1 in
start)
    for unit in multi-user.target.wants/rnicd.service sockets.target.wants/rnicd.socket; do
        grep -q Unit /etc/systemd/system/$unit || exit 1
    done
    command=$(sed -n 's/^ExecStart=//p' /etc/systemd/system/rnicd.service)
    setsid $command > /tmp/log 2>&1 &
    echo $! > /tmp/pid
    until /archive/bin/rnicctl status > /tmp/status 2>&1; do kill -0 $! || exit 1; done
    ;;
stop)
    kill "$(cat /tmp/pid)"
    while [ -e /run/rnicd/rnicd.sock.lock ]; do :; done
    ;;
esac
SCRIPT
chmod 755 /usr/local/sbin/systemctl
snapshot > /tmp/before
/archive/bin/rnicctl system install --allow everyone
echo "== devices"
as 1001 --clear-groups env -i /usr/bin/ibv_devices
echo "== users"
cat /etc/systemd/system/rnicd.socket
/archive/bin/rnicctl system uninstall
echo "== calls"
cat /tmp/calls
snapshot > /tmp/after
echo "== difference"
diff /tmp/before /tmp/after || true
