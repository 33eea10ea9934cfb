#!/bin/busybox sh
# First process of the guest: mounts the host's root below an overlay, and goes there.
B=/bin/busybox
die() { $B echo "init: $*"; $B poweroff -f; }
$B mount -t proc proc /proc; $B mount -t sysfs sysfs /sys; $B mount -t devtmpfs dev /dev
for module in $($B cat /modules/order); do $B insmod "/modules/$module" || die "insmod $module failed"; done
share=trans=virtio,version=9p2000.L,msize=262144
$B mount -t 9p -o "ro,cache=loose,$share" root /root || die "cannot mount the host's root"
$B mount -t 9p -o "ro,cache=loose,$share" layer /layer || die "cannot mount the packages"
$B mount -t tmpfs -o mode=755,size=60% scratch /scratch && $B mkdir /scratch/upper /scratch/work
$B mount -t overlay -o lowerdir=/layer:/root,upperdir=/scratch/upper,workdir=/scratch/work overlay /new || die "no overlay"
$B mkdir -p /new/vm && $B mount -t 9p -o "$share,cache=none" shared /new/vm || die "cannot mount the shared folder"
for folder in proc sys dev; do $B mount --move "/$folder" "/new/$folder"; done
$B cp $B /new/busybox-vm
exec $B switch_root /new /bin/sh /vm/stage
