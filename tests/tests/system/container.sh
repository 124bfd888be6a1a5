# Makes a root directory from the distribution's files in $1/root, and executes the other arguments
# in it.
set -e
mount --make-rprivate /
top=$1
shift
mount -t tmpfs -o mode=755 none "$top/root"
cd "$top/root"
mkdir -p archive dev etc home proc root run sys tmp usr var/cache var/lib var/log
chmod 1777 tmp
for folder in bin sbin lib lib32 lib64 libx32; do
    if [ -L /$folder ]; then
        cp -P /$folder .
    elif [ -d /$folder ]; then
        mkdir $folder
        mount --rbind /$folder $folder
    fi
done
mount --rbind /usr usr
mount -t tmpfs -o mode=755 none usr/local
cp -a /etc/. etc/
rm -rf etc/rnicd etc/ld.so.conf.d/00-rnicd.conf
for file in passwd group; do
    grep -v '^rnicd:' /etc/$file > etc/$file
done
mount -t proc proc proc
mount --rbind /sys sys
# Nothing is created in the host's /dev.
mount -t tmpfs -o mode=755 none dev
mkdir dev/shm
for file in null zero full random urandom tty; do
    touch dev/$file
    mount --bind /dev/$file dev/$file
done
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=1777 none dev/shm
mount --bind "$top/archive" archive
ldconfig -r .
ip link set lo up
exec chroot . /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
