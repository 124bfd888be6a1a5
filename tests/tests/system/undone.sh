set -e
mkdir /etc/rnicd
printf '[control]\nno-such-key = 1\n' > /etc/rnicd/rnicd.toml
snapshot > /tmp/before
echo "== invalid"
/archive/bin/rnicctl system install --commands --preload && exit 1
snapshot > /tmp/after
rm -r /etc/rnicd
/archive/bin/rnicd run > /dev/null 2>&1 &
until /archive/bin/rnicctl status > /dev/null 2>&1; do kill -0 $!; done
snapshot > /tmp/before2
echo "== taken"
/archive/bin/rnicctl system install && exit 1
snapshot > /tmp/after2
echo "== owned"
mkdir /home/user /home/all
chown 1001 /home/user
chmod 777 /home/all
for folder in user/rnicd all; do
    /archive/bin/rnicctl system install --prefix /home/$folder && exit 1
done
rmdir /home/user /home/all
snapshot > /tmp/after3
echo "== difference"
diff /tmp/before2 /tmp/after3 || true
diff /tmp/before /tmp/after || true
diff /tmp/before2 /tmp/after2 || true
kill $!
