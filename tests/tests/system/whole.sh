set -e
snapshot > /tmp/before
echo "== install"
/archive/bin/rnicctl system install
echo "== devices"
env -i /usr/bin/ibv_devices
echo "== bandwidth"
bandwidth env -i
echo "== member"
group=$(sed -n 's/^rnicd:[^:]*:\([0-9]*\):.*/\1/p' /etc/group)
bandwidth as 1001 --groups "$group" env -i
echo "== others"
as 1001 --clear-groups env -i /usr/bin/ib_write_bw -n 5 127.0.0.1 || true
echo "== modprobe"
PATH=/usr/local/lib/rnicd/bin:$PATH
if modprobe rdma_rxe && modprobe -r siw && rmmod rdma_rxe; then echo loaded; fi
# If the distribution has a modprobe, it refuses the name or finds no module.
if [ -x /usr/sbin/modprobe ] || [ -x /sbin/modprobe ]; then
    echo "no other modprobe is missing"
else
    modprobe rnic_no_such_module || true
fi
echo "== link"
rdma link
echo "== json"
rdma -j link
echo "== added"
rdma link add rxe0 type rxe netdev lo
rdma link
if env -i /usr/bin/ibv_devices | grep -q rxe0; then echo "rxe0 in verbs"; fi
rdma link delete rxe0
if ! rdma link show rxe0/1 > /dev/null 2>&1; then echo "rxe0 deleted"; fi
if ! rdma link add rxe0 type rxe netdev no-such-device 2> /dev/null; then echo refused; fi
echo "== status"
rnicctl system status
echo "== again"
# Any user can lock the root directory, which must not stop the installation.
flock -o / /usr/local/bin/rnicctl system install
env -i /usr/bin/ibv_devices
rnicctl system stop
rnicctl system start
env -i /usr/bin/ibv_devices
echo "== uninstall"
/archive/bin/rnicctl system uninstall
snapshot > /tmp/after
echo "== difference"
diff /tmp/before /tmp/after || true
echo "== loader"
ldconfig -p | grep rnicd || true
