# Process 1 of the guest, once its root is mounted: sets up Soft-RoCE, runs the command, and powers off.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
finish() { echo "$1" >/vm/code.part; mv /vm/code.part /vm/code; sync; /busybox-vm poweroff -f; }
fail() { echo "vm: $*" >/dev/ttyS1; finish 125; }

mount -t tmpfs tmpfs /run
mkdir -p /dev/shm /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t devpts devpts /dev/pts
# The command's output leaves by the second serial line as it is: kept open, so that the line stays raw.
exec 3</dev/ttyS1
stty -F /dev/ttyS1 raw -echo 115200
hostname vm
ip link set lo up

modprobe -a dummy rdma_rxe ib_uverbs || fail "the kernel has no Soft-RoCE"
ip link add farside0 type dummy && ip link set farside0 address 02:00:00:00:00:01 mtu 4200 up || fail "no interface"
ip addr add 10.9.0.1/24 dev farside0
rdma link add rxe0 type rxe netdev farside0 || fail "no device"

setsid sh /vm/command </dev/null >/dev/ttyS1 2>&1
finish $?
