# The tests read all output.
exec 2>&1

# Prints names, modes, owners and contents of all files that an installation may change.
snapshot() {
    for top in /etc /usr/local /var /run /dev /home /root /opt; do
        [ ! -e $top ] || find $top -xdev ! -path '/var/cache/ldconfig/aux-cache' \
            -printf '%p %y %m %U %G %l\n'
    done | sort
    find /etc /usr/local /var /run -xdev -type f ! -path '/var/cache/ldconfig/aux-cache' \
        -exec sha256sum {} + | sort
    cat /proc/mounts
}

# Runs ib_write_bw as a server and a client. The arguments are the command that starts both.
bandwidth() {
    "$@" /usr/bin/ib_write_bw -n 100 > /tmp/server 2>&1 &
    server=$!
    until "$@" /usr/bin/ib_write_bw -n 100 127.0.0.1 > /tmp/client 2>&1; do
        kill -0 $server || break
    done
    wait $server || true
    cat /tmp/client
    rm -f /tmp/client /tmp/server
}

as() {
    id=$1
    shift
    setpriv --reuid "$id" --regid "$id" "$@"
}

