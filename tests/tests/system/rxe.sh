set -e
echo "== install"
/archive/bin/rnicctl system install --profile rxe --allow everyone --commands
echo "== first"
env -i /usr/bin/ibv_devices
echo "== job"
modprobe rdma_rxe
if ! rdma link add rxe0 type rxe netdev no-such-device 2> /dev/null; then rdma link; fi
rdma link add rxe0 type rxe netdev lo
rdma link
rdma link add rxe0 type rxe netdev lo || true
echo "== limits"
env -i /usr/bin/ibv_devinfo -v -d rxe0
echo "== pingpong"
env -i /usr/bin/ibv_rc_pingpong -d rxe0 -g 1 -n 10 &
server=$!
until env -i /usr/bin/ibv_rc_pingpong -d rxe0 -g 1 -n 10 127.0.0.1 > /tmp/client; do
    kill -0 $server || break
done 2> /tmp/errors
wait $server || true
cat /tmp/client
/usr/local/bin/rnicctl system uninstall
