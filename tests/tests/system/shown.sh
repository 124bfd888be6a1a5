set -e
# umount(8) would create this folder.
mkdir /run/mount
snapshot > /tmp/before
show() {
    ls /sys/class/infiniband/ /dev/infiniband/ /sys/class/net/
    cat /sys/class/infiniband/rnicd1/ports/1/state
}
/archive/bin/rnicctl system install --mount
echo "== mount"
show
/archive/bin/rnicctl system stop
# The state after a restart of the container.
umount -l /sys/class
rm /dev/infiniband
/archive/bin/rnicctl system start
show
/archive/bin/rnicctl system uninstall
/archive/bin/rnicctl system install --preload
echo "== preload"
ls /sys/class/infiniband/ /dev/infiniband/
ls /sys/class/net/
cat /sys/class/infiniband/rnicd1/ports/1/state
# The daemon runs with the preloaded library, too.
rnicctl system stop
rnicctl system start
env -i /usr/bin/ibv_devices
echo "== rdma"
# Of iproute2.
if [ -x /usr/bin/rdma ]; then
    env -i /usr/bin/rdma link add rxe0 type rxe netdev lo
    env -i /usr/bin/rdma resource
fi
/archive/bin/rnicctl system uninstall
snapshot > /tmp/after
echo "== difference"
diff /tmp/before /tmp/after || true
