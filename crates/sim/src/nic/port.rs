//! The NIC of a machine that is a node and a client at once, as far as it limits the requests that the machine sends
//! and serves.
//!
//! Its parts are queues: the unit that starts one end of an exchange, with its cache of connections; the two directions
//! of the link; and the two directions of PCIe, between the NIC and the machine's memory.
//!
//! Invariant: a part is asked when a request reaches it, so requests pass each part in the order of their arrival.

use super::Sender;
use crate::hardware::{
    COMPLETION, Cluster, DATAGRAM, INFINIBAND, PCIE_PACKET, PCIE_PAYLOAD, RECEIVE, ROUTE_HEADER, SEND,
};
use crate::station::{Picos, Station};
use crate::world::{Nanos, World};
use std::cell::Cell;

/// NIC of a machine of a [`Cluster`].
pub struct Port {
    world: World,
    unit: Sender,
    outgoing: Station,
    incoming: Station,
    /// The two directions of PCIe: from the NIC to memory, and back.
    to_memory: Station,
    from_memory: Station,
    cluster: Cluster,
    used: Cell<Used>,
}

/// Work of a port since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// Number of ends of exchanges that the unit has started.
    pub ends: u64,
    /// Bytes that the link has sent and received, with headers.
    pub link: [u64; 2],
    /// Bytes that PCIe has carried to memory and from memory, with headers.
    pub pcie: [u64; 2],
}

/// Way in which a request to send is posted to the NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posting {
    /// The core writes the descriptor to the NIC, as the doorbell.
    Doorbell,
    /// The NIC reads the descriptor, which is in a list behind one with a doorbell.
    Listed,
}

impl Port {
    /// Creates the NIC of a machine of this cluster.
    pub fn new(world: &World, cluster: Cluster) -> Port {
        let inputs = &cluster.inputs;
        let [outgoing, incoming, to_memory, from_memory] = [(); 4].map(|()| Station::new(1));
        let (world, unit, used) = (world.clone(), inputs.sender(), Cell::default());
        Port { world, unit, outgoing, incoming, to_memory, from_memory, cluster, used }
    }

    /// Work of the port since its creation.
    pub fn used(&self) -> Used {
        self.used.get()
    }

    /// Number of times that the state of a connection was not cached.
    pub fn misses(&self) -> u64 {
        self.unit.misses()
    }

    /// Starts this machine's end of exchanges on a connection.
    pub async fn start(&self, connection: u32, ends: u64) {
        self.uses(|used| used.ends += ends);
        let done = self.unit.leaves(self.world.now(), connection, ends);
        self.world.sleep_until(done).await;
    }

    /// Sends a message of `len` bytes, in packets.
    pub async fn send(&self, len: u64, kind: Packets) {
        let bytes = kind.bytes(len, self.cluster.inputs.packet_max);
        self.uses(|used| used.link[0] += bytes);
        self.pass(&self.outgoing, bytes, self.cluster.link_gbit).await;
    }

    /// Receives a message of `len` bytes, in packets.
    pub async fn receive(&self, len: u64, kind: Packets) {
        let bytes = kind.bytes(len, self.cluster.inputs.packet_max);
        self.uses(|used| used.link[1] += bytes);
        self.pass(&self.incoming, bytes, self.cluster.link_gbit).await;
    }

    /// Takes the descriptor of a request to send.
    pub async fn take(&self, posting: Posting, kind: Packets) {
        let [datagram, read] = SEND;
        let len = if kind == Packets::Datagrams { datagram } else { read };
        let [written, returned] = PCIE_PACKET;
        let back = match posting {
            Posting::Doorbell => len + written,
            Posting::Listed => {
                // One packet requests or returns several descriptors.
                self.use_pcie([written * len / PCIE_PAYLOAD, 0]);
                len + returned * len / PCIE_PAYLOAD
            }
        };
        self.uses(|used| used.pcie[1] += back);
        self.pass(&self.from_memory, back, self.cluster.pcie_gbit).await;
    }

    /// Reads `len` bytes of memory.
    pub async fn read(&self, len: u64) {
        let [requested, returned] = PCIE_PACKET;
        self.uses(|used| used.pcie[0] += requested);
        self.pass(&self.to_memory, requested, self.cluster.pcie_gbit).await;
        self.world.sleep(self.cluster.inputs.pcie_ns).await;
        let back = on_pcie(len, returned);
        self.uses(|used| used.pcie[1] += back);
        self.pass(&self.from_memory, back, self.cluster.pcie_gbit).await;
    }

    /// Writes `len` bytes to memory.
    pub async fn write(&self, len: u64) {
        let bytes = on_pcie(len, PCIE_PACKET[0]);
        self.uses(|used| used.pcie[0] += bytes);
        self.pass(&self.to_memory, bytes, self.cluster.pcie_gbit).await;
    }

    /// Writes a datagram of `len` bytes to memory, where a core polls for its completion.
    pub async fn deliver(&self, len: u64) {
        let [written, returned] = PCIE_PACKET;
        let [descriptor, at_once] = RECEIVE;
        // Descriptors of buffers are read in advance.
        self.use_pcie([written / at_once, descriptor + returned / at_once]);
        self.write(ROUTE_HEADER + len).await;
        self.write(COMPLETION).await;
    }

    /// Occupies the directions of PCIe with this many bytes, for which nothing waits.
    fn use_pcie(&self, [to_memory, from_memory]: [u64; 2]) {
        let (now, gbit) = (self.world.now(), self.cluster.pcie_gbit);
        self.uses(|used| {
            used.pcie[0] += to_memory;
            used.pcie[1] += from_memory;
        });
        self.to_memory.pass(now, takes(to_memory, gbit));
        self.from_memory.pass(now, takes(from_memory, gbit));
    }

    async fn pass(&self, part: &Station, bytes: u64, gbit: u64) {
        let done: Nanos = part.pass(self.world.now(), takes(bytes, gbit));
        self.world.sleep_until(done).await;
    }

    fn uses(&self, add: impl FnOnce(&mut Used)) {
        let mut used = self.used.get();
        add(&mut used);
        self.used.set(used);
    }
}

/// Kind of a message's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packets {
    /// Those of a connection.
    Connected,
    /// Those of datagrams.
    Datagrams,
}

impl Packets {
    /// Number of bytes on the link of a message of `len` bytes, in packets with at most `packet_max` bytes of payload.
    fn bytes(self, len: u64, packet_max: u64) -> u64 {
        let header = INFINIBAND + if self == Packets::Datagrams { DATAGRAM } else { 0 };
        len + header * len.div_ceil(packet_max).max(1)
    }
}

/// Number of bytes on PCIe of `len` bytes, in packets with `header` bytes besides their payload.
fn on_pcie(len: u64, header: u64) -> u64 {
    len + header * len.div_ceil(PCIE_PAYLOAD).max(1)
}

/// Time in which `bytes` bytes pass at this rate.
fn takes(bytes: u64, gbit: u64) -> Picos {
    bytes * 8_000 / gbit
}
