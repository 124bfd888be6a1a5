set -e
export RUNNER_TEMP=/tmp/runner GITHUB_ENV=/tmp/env GITHUB_PATH=/tmp/path GITHUB_OUTPUT=/tmp/output
mkdir $RUNNER_TEMP
tar --zstd -cf /tmp/rnicd.tar.zst archive
export INPUT_ARCHIVE=/tmp/rnicd.tar.zst INPUT_PROFILE=rxe INPUT_DEVICE_NAME=rxe_7 INPUT_INTERFACE=lo
export INPUT_SYSTEM=true
echo "== start"
bash /archive/action/start
echo "== output"
cat $GITHUB_OUTPUT
echo "== sudo"
env -i /usr/bin/ibv_devices
env -i "PATH=$PATH" rdma link
echo "== bandwidth"
# The server has an empty environment, as under sudo, and the client the environment of the job.
env -i /usr/bin/ib_write_bw -d rxe_7 -n 100 > /tmp/server 2>&1 &
server=$!
until as 1001 --clear-groups env -i $(cat $GITHUB_ENV) \
    /usr/bin/ib_write_bw -d rxe_7 -n 100 127.0.0.1 > /tmp/client 2>&1; do
    kill -0 $server || break
done
wait $server || true
cat /tmp/client
echo "== report"
bash /archive/action/report
# Another job on the same runner.
echo "== again"
INPUT_DEVICE_NAME=rxe_8 bash /archive/action/start
env -i /usr/bin/ibv_devices
/usr/local/bin/rnicctl system uninstall
