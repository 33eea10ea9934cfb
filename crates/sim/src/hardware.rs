//! All numbers about hardware in the simulator, with unit and source, and functions derived from them.
//!
//! Invariant: all calibration uses two sets of micro-benchmarks. One is figure 1 of PRISM (Burke et al., SOSP 2021).
//! The other is section 4 of *Design Guidelines for Correct, Efficient, and Scalable Synchronization using One-Sided
//! RDMA* (Ziegler et al., SIGMOD 2023; here *Synchronization*). Measurements of applications are never inputs: the
//! model predicts them. [`CONNECTX_6`] differs from the calibrated inputs only in numbers that describe the NIC alone.
//! The clusters of FaSST, [`CX3`] and [`CIB`], have NICs of their own, whose numbers are micro-benchmarks, too.

use crate::nic::{Sender, Timing};
use crate::station::Picos;
use crate::world::Nanos;
use farside_remote::chain::OpView;
use farside_remote::wire::{Code, flag};
use farside_remote::{Addr, Capabilities, ChainView, Reply, Status};

/// Parameters of the hardware, which the model's latencies and times follow from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inputs {
    /// Latency of a verb's round trip: posting, the latency within the NICs, the cable in both directions, and the
    /// completion. Excludes memory accesses and the transmission of bytes. PRISM, figure 1: a WRITE of 512 bytes takes
    /// 1.9 us, of which the transmission and [`Inputs::nic_op_ps`] take 262 ns.
    pub verb_ns: Nanos,
    /// Time that a NIC is busy with one op. Synchronization, section 4: a ConnectX-5 executes 51.2 million per second.
    pub nic_op_ps: Picos,
    /// Whether the node's NIC takes the time of one op for a list of verbs, whatever its length. No NIC does; as an
    /// experiment, it shows what the verbs of a system cost beyond its waves.
    pub lists_are_ops: bool,
    /// Maximum payload of a packet in bytes: [`PACKET_MAX`], unless the network has larger frames.
    pub packet_max: u64,
    /// Whether a CAS of the NIC can compare and swap under masks, and stores have words in the NIC's own memory.
    /// ConnectX-4 and later have both, by an interface of their vendor's. *PRISM* and *Synchronization* do not use it.
    pub has_extensions: bool,
    /// Time of a NIC's read of the host's memory over PCIe. PRISM, figure 1: the difference between READ and WRITE, and
    /// between an indirect READ and READ. Writes have no such time: they are posted, and nothing waits for them.
    pub pcie_ns: Nanos,
    /// Time from an atomic's arrival at the NIC until it acquires its slot. PRISM, figure 1: CAS takes 2.5 us.
    pub atomic_ns: Nanos,
    /// Time that an atomic holds its slot. Synchronization, section 4: 2.32 million CAS per second on one word imply
    /// 431 ns, and 25.6 million on 8 slots imply 313 ns. This value is about midway between the two.
    pub slot_ns: Nanos,
    /// Bits of an atomic's address that select its slot. Synchronization, section 4: the low 12.
    pub slot_mask: u64,
    /// Time of an access to a NIC's own memory. Sherman (SIGMOD 2022): 110 million CAS per second on that memory.
    pub on_chip_ns: Nanos,
    /// Number of connections that a client's NIC caches. Synchronization, section 4: 32 connections per NIC do not
    /// reduce the throughput, and 128 do. This value is an estimate between the two.
    pub qp_cache: usize,
    /// Time that a client's NIC is busy fetching the state of a connection that the NIC does not cache. Estimated: a
    /// fetch takes [`Inputs::pcie_ns`], and four fetches are in flight at the same time. The value must exceed 60 ns:
    /// otherwise 512 workers would not be slower than 128, as they are in Synchronization, section 4.
    pub qp_miss_ns: Nanos,
    /// Latency that a message to a CPU has in addition to a verb's, for descriptors and polling in both directions.
    /// Excludes the core's work. PRISM, figure 1: every op of software PRISM takes 5.0 to 5.3 us.
    pub two_sided_ns: Nanos,
    /// Time that a core is busy with a message and its response. FaSST (Kalia et al., OSDI 2016): about 4 million small
    /// calls per second on a core.
    pub core_message_ns: Nanos,
    /// Time of an access to uncached memory. Typical of the Xeon Gold 6138 of PRISM's testbed.
    pub core_access_ns: Nanos,
    /// Time to copy a byte whose fetch from memory has already begun. Typical of the same CPU: 10 GB/s.
    pub core_copy_ps: Picos,
    /// Time in which a core computes the CRC-64 of a byte: [`CRC_TABLE_PS`] or [`CRC_VECTOR_PS`].
    pub crc_ps: Picos,
    /// Time in which an event wakes a core that sleeps: the NIC's interrupt, and the scheduling of the thread. Cores
    /// that poll do not sleep. FastWake (Li et al., APNet 2023), abstract: removing the wake-ups of a round trip
    /// removes 80 % of its latency, down to 0.3 to 0.4 us above the hardware's. With the 1.9 us of
    /// [`Inputs::verb_ns`]'s source, the latency was 11.3 us, of which two wake-ups, one at each end, took 9.4 us.
    pub wake_ns: Nanos,
    /// Latency that a message to a BlueField's CPU has in addition to a verb's, without accesses to the host's memory.
    /// PRISM, figure 1: READ makes one such access, and an indirect READ makes two.
    pub arm_ns: Nanos,
    /// Number of the BlueField's cores: Cortex-A72 (PRISM, section 5).
    pub arm_cores: u32,
    /// Time that a BlueField's core is busy with a message, without accesses to the host's memory. Estimated:
    /// [`Inputs::core_message_ns`] at 800 MHz in place of 2 GHz.
    pub arm_message_ns: Nanos,
    /// Time of a BlueField core's read of the host's memory. PRISM, figure 1: the difference between an indirect READ
    /// and READ.
    pub arm_read_ns: Nanos,
    /// Time of a BlueField core's write of the host's memory. PRISM, figure 1: a WRITE's time minus that of a READ
    /// without its memory access. A CAS takes as long as two reads.
    pub arm_write_ns: Nanos,
}

/// Parameters of the machines of the papers' testbeds.
pub const INPUTS: Inputs = Inputs {
    verb_ns: 1_638,
    nic_op_ps: 19_531,
    lists_are_ops: false,
    packet_max: PACKET_MAX,
    has_extensions: false,
    pcie_ns: 600,
    atomic_ns: 378,
    slot_ns: 370,
    slot_mask: 0xfff,
    on_chip_ns: 9,
    qp_cache: 64,
    qp_miss_ns: 150,
    two_sided_ns: 2_830,
    core_message_ns: 250,
    core_access_ns: 90,
    core_copy_ps: 100,
    crc_ps: CRC_TABLE_PS,
    wake_ns: 4_700,
    arm_ns: 6_600,
    arm_cores: 8,
    arm_message_ns: 625,
    arm_read_ns: 3_200,
    arm_write_ns: 4_200,
};

/// Parameters of the machines of SMART (Luo et al., OSDI 2023), on which the paper also measures Sherman and ART:
/// CloudLab's r650, with one ConnectX-6 of 100 Gb/s.
///
/// What differs from the calibrated [`INPUTS`]:
///
/// - `nic_op_ps`: 45 million READs per second, the bound of the NIC that the paper's section 3 states. There, a B+ tree
///   is 10.8 times below this bound. ART reaches the bound, so the peak of ART's reads is no test of the model.
/// - `packet_max`: the artifact's queue pairs have an MTU of 4096 bytes (`src/rdma/StateTrans.cpp`).
/// - `has_extensions`: the artifact uses masked CAS and the NIC's own memory.
///
/// What is the same, since no micro-benchmark of this NIC is available: a ConnectX-5 of *PRISM* and *Synchronization*
/// has the same times of a verb and of PCIe (a ConnectX-6 on PCIe 4.0 is not slower), and the same lock slots of
/// atomics. The NIC's own memory is that of a ConnectX-5 in Sherman. The number of connections that a client's NIC
/// caches is an estimate for a ConnectX-5, too; a fetch of 150 ns for each message allows the paper's 16 machines 107
/// million messages per second, more than two memory nodes execute.
pub const CONNECTX_6: Inputs =
    Inputs { nic_op_ps: 22_222, packet_max: 4_096, has_extensions: true, ..INPUTS };

/// Time of a byte of a CRC-64 that is computed byte by byte with a table: 7 cycles, for a load from the L1 cache, a
/// shift and two exclusive ors, each of which depends on the one before, at 2 GHz, the nominal clock of a Xeon Gold
/// 6138 (PRISM, section 5).
pub const CRC_TABLE_PS: Picos = 7 * 1_000 / 2;
/// Time of a byte of a CRC-64 that is computed with carry-less multiplications of 128 bits, as in this release. The
/// documentation of crc-fast 1.9 has 11 GiB/s for 1 KiB and 16 GiB/s for 1 MiB on a CPU whose multiplications are as
/// wide as those of a Xeon Gold 6138 (Graviton2, 2.5 GHz). Rounded.
pub const CRC_VECTOR_PS: Picos = 100;

impl Inputs {
    /// Returns the time, in nanoseconds, in which a core computes the CRC-64 of `bytes` bytes.
    pub const fn crc_ns(&self, bytes: u64) -> Nanos {
        bytes * self.crc_ps / 1_000
    }

    /// Returns a model of the NIC of a client's machine.
    pub fn sender(&self) -> Sender {
        Sender::new(self.nic_op_ps, self.qp_miss_ns * 1_000, self.qp_cache)
    }

    /// Returns the timing of the NIC of a testbed's node.
    pub const fn timing(&self, testbed: Testbed) -> Timing {
        Timing {
            flight_ns: (self.verb_ns + testbed.distance.round_trip_ns()) / 2,
            flight_spread_ns: 0,
            link_gbit: testbed.link_gbit,
            op_ps: self.nic_op_ps,
            lists_are_ops: self.lists_are_ops,
            packet_max: self.packet_max,
            fetch_ns: self.pcie_ns,
            fetch_spread_ns: 0,
            land_spread_ns: 0,
            atomic_ns: self.atomic_ns,
            slot_ns: self.slot_ns,
            slot_spread_ns: 0,
            on_chip_ns: self.on_chip_ns,
            slot_mask: self.slot_mask,
            relaxed: false,
        }
    }
}

/// Hardware that runs chains at a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Platform {
    /// A NIC that supports RDMA's verbs only.
    Rdma,
    /// Cores of the node's CPU, which receive messages.
    PrismSw,
    /// A NIC that supports PRISM's operations: the paper's projection.
    PrismHw,
    /// The cores of a BlueField NIC, which access the host's memory over PCIe.
    BlueField,
}

impl Platform {
    /// All platforms, in the order of the columns of `micro::FIGURE_1`.
    pub const ALL: [Platform; 4] =
        [Platform::Rdma, Platform::PrismSw, Platform::PrismHw, Platform::BlueField];

    /// Name of the platform in flags and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Platform::Rdma => "rdma",
            Platform::PrismSw => "prism-sw",
            Platform::PrismHw => "prism-hw",
            Platform::BlueField => "bluefield",
        }
    }

    /// Whether a NIC runs the chains itself.
    pub const fn is_one_sided(self) -> bool {
        matches!(self, Platform::Rdma | Platform::PrismHw)
    }

    /// Returns the capabilities of a node with this hardware.
    pub const fn capabilities(self) -> Capabilities {
        match self {
            Platform::Rdma => Capabilities::CALLS.and(Capabilities::WHOLE_LINES),
            Platform::PrismSw | Platform::PrismHw | Platform::BlueField => Capabilities::SOFTWARE,
        }
    }
}

/// Distance between clients and a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Distance {
    /// Client and node are connected by one cable.
    Direct,
    /// Client and node are connected by one switch.
    Rack,
    /// Client and node are connected by three tiers of switches.
    Cluster,
    /// The path between client and node crosses a data centre.
    DataCentre,
}

impl Distance {
    /// All distances, the shortest first.
    pub const ALL: [Distance; 4] =
        [Distance::Direct, Distance::Rack, Distance::Cluster, Distance::DataCentre];

    /// Name of the distance in flags and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Distance::Direct => "direct",
            Distance::Rack => "rack",
            Distance::Cluster => "cluster",
            Distance::DataCentre => "data-centre",
        }
    }

    /// Round-trip latency that the distance adds, in nanoseconds. PRISM, figure 2, has 0.6, 3 and 24 us; 0.6 us is the
    /// latency of the testbed's own switch (section 5).
    pub const fn round_trip_ns(self) -> Nanos {
        match self {
            Distance::Direct => 0,
            Distance::Rack => 600,
            Distance::Cluster => 3_000,
            Distance::DataCentre => 24_000,
        }
    }
}

/// Network and machines of a paper's testbed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Testbed {
    /// Bandwidth of the node's link in each direction, in Gb/s.
    pub link_gbit: u64,
    /// Distance between the clients and the node.
    pub distance: Distance,
    /// Number of the node's cores that serve messages.
    pub cores: u32,
    /// Number of the clients' machines.
    pub machines: u32,
}

impl Testbed {
    /// PRISM's micro-benchmarks: two machines, one cable (section 5).
    pub const PRISM_MICRO: Testbed =
        Testbed { link_gbit: 25, distance: Distance::Direct, cores: 16, machines: 1 };
    /// Testbed of PRISM's application benchmarks (section 5).
    pub const PRISM_APPLICATIONS: Testbed =
        Testbed { link_gbit: 40, distance: Distance::Rack, cores: 16, machines: 11 };
    /// Testbed of Chequer (Journal of Computer Applications 40(2), 2020): three identical nodes and one switch. The
    /// paper's hardware is not known further, so all other numbers are those of [`Testbed::PRISM_APPLICATIONS`], whose
    /// machines are closest in age. One node serves, and clients run on the two others.
    pub const CHEQUER: Testbed = Testbed { machines: 2, ..Testbed::PRISM_APPLICATIONS };
    /// Testbed of Synchronization, section 4: a node of two Xeons with 14 cores each, four machines with workers, and
    /// one switch, whose latency [`Inputs::verb_ns`] covers.
    pub const SYNCHRONIZATION: Testbed =
        Testbed { link_gbit: 100, distance: Distance::Direct, cores: 28, machines: 4 };
    /// Testbed of SMART's evaluation (section 5): 16 machines of two Xeons with 36 cores each, with clients on all of
    /// them, and one switch. Two of the machines are memory nodes, too. In the model, a memory node's own clients have
    /// another NIC, and reach it over the network like all others. The latency of the switch is that of PRISM's.
    pub const SMART: Testbed = Testbed { link_gbit: 100, distance: Distance::Rack, cores: 72, machines: 16 };
    /// Testbed of SMART's motivation (section 3): clients on 8 machines, and one memory node.
    pub const SMART_MOTIVATION: Testbed = Testbed { machines: 8, ..Testbed::SMART };
}

/// A cluster whose machines are nodes and clients at the same time, as those of FaSST (Kalia et al., OSDI 2016).
///
/// A machine has one NIC, which sends, serves and receives. Its threads run one on each core. They post verbs on
/// connections to other machines, and calls on one datagram queue pair each.
///
/// Of the other [`Inputs`], `nic_op_ps` is the time that a NIC is busy with one end of an exchange: a request that it
/// sends, whose response it receives, or a request that it receives, whose response it sends. `core_message_ns` is the
/// time that two cores, the caller's and the node's, are busy with a call that has two doorbells of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cluster {
    /// Name in figures.
    pub name: &'static str,
    /// Number of machines.
    pub machines: u32,
    /// Number of threads of each machine, one for each core.
    pub threads: u32,
    /// Parameters that all models have.
    pub inputs: Inputs,
    /// Bandwidth of a machine's link in each direction, in Gb/s.
    pub link_gbit: u64,
    /// Bandwidth between a machine's memory and its NIC in each direction, in Gb/s.
    pub pcie_gbit: u64,
    /// Time that a core is busy with a one-sided verb and its completion, without the doorbell. FaSST: a core issues
    /// 10.9 million READs per second on its own queue pairs, each with a doorbell.
    pub core_verb_ns: Nanos,
    /// Time that a core is busy with a doorbell, an uncached write to the NIC. Estimated: about half of a READ's time.
    pub doorbell_ns: Nanos,
    /// Time in which a core fetches a cache line that another core has changed. Estimated: as long as an access to
    /// uncached memory, [`Inputs::core_access_ns`].
    pub line_ns: Nanos,
}

/// Lines that threads that share a queue pair take from each other for each verb: the lock and the head of the queue
/// pair, and the lock and the head of the completion queue.
pub const SHARED_LINES: [u64; 2] = [2, 2];
/// Largest number of messages that are posted with one doorbell. FaSST's public code (`app/rpc-test/rpc-test.json`).
pub const POSTLIST: u64 = 16;
/// Overhead of every packet of native InfiniBand in bytes: local route header 8, base transport header 12, invariant
/// and variant CRC 6 (InfiniBand specification, release 1.3, volume 1).
pub const INFINIBAND: u64 = 8 + 12 + 6;
/// Size in bytes of what a datagram has in addition: datagram extended header 8, and the immediate 4 in which FaSST has
/// the header of its packets.
pub const DATAGRAM: u64 = 8 + 4;
/// Size in bytes of the global route header, for which each received datagram has room in memory.
pub const ROUTE_HEADER: u64 = 40;
/// Size in bytes of an entry of a completion queue (mlx5).
pub const COMPLETION: u64 = 64;
/// Size in bytes of a descriptor of a buffer to receive into (mlx5), and the number of them that a NIC reads at once: a
/// cache line of them.
pub const RECEIVE: [u64; 2] = [16, 4];
/// Size in bytes of a descriptor of a request to send: two cache lines for a datagram, one for a READ. The NIC reads
/// the descriptors of a list with one doorbell, and the core writes a single one to the NIC.
pub const SEND: [u64; 2] = [128, 64];
/// Overhead in bytes of a packet on PCIe 3.0 that writes or requests memory, and of one that returns memory: framing 4,
/// header 16 or 12, CRC 4.
pub const PCIE_PACKET: [u64; 2] = [24, 20];
/// Maximum payload in bytes of a packet on PCIe, as hosts set it.
pub const PCIE_PAYLOAD: u64 = 256;

/// Cluster CIB of FaSST: 11 machines with 14 cores and Connect-IB, of two ports with 56 Gb/s each.
///
/// The NIC's rate is calibrated on about 50 million READs per second and machine, while all machines issue and serve
/// READs. All other numbers of this NIC are those of its authors' micro-benchmark (`other/dct-bench/README.md` of the
/// public code), in which the threads of 10 machines READ from one machine:
///
/// - `verb_ns`: a READ takes 1.9 us, of which [`Inputs::pcie_ns`] are the access to memory.
/// - `qp_cache`: with 2,240 connections, the NIC serves 20.1 million READs per second, and makes 10.85 million more
///   reads over PCIe than these READs need. So it caches 46 % of the connections.
/// - `qp_miss_ns`: with 140 connections, it serves 94.6 million READs per second. The difference, 39.2 ns for each
///   READ, is due to 0.54 misses.
///
/// Link and PCIe: four lanes of FDR carry 54.5 Gb/s of data, and 16 lanes of PCIe 3.0 carry 126 Gb/s.
pub const CIB: Cluster = Cluster {
    name: "CIB",
    machines: 11,
    threads: 14,
    inputs: Inputs {
        verb_ns: 1_300,
        nic_op_ps: 10_000,
        packet_max: 4_096,
        qp_cache: 1_030,
        qp_miss_ns: 73,
        ..INPUTS
    },
    link_gbit: 109,
    pcie_gbit: 126,
    core_verb_ns: 42,
    doorbell_ns: 50,
    line_ns: INPUTS.core_access_ns,
};

/// Cluster CX3 of FaSST: 192 machines with 8 cores and ConnectX-3, one port with 56 Gb/s, and 8 lanes of PCIe 3.0.
///
/// The NIC's rate is that of HERD (Kalia et al., SIGCOMM 2014) on the same type: 26 million READs per second, served by
/// one machine. No micro-benchmark of its cache of connections is available, so `qp_cache` and `qp_miss_ns` are the
/// estimates for the ConnectX-5 of [`INPUTS`], as are the times of a verb. The cores are taken to be as fast as CIB's.
pub const CX3: Cluster = Cluster {
    name: "CX3",
    machines: 192,
    threads: 8,
    inputs: Inputs { nic_op_ps: 38_462, packet_max: 4_096, ..INPUTS },
    link_gbit: 54,
    pcie_gbit: 63,
    ..CIB
};

/// Overhead of every packet in bytes: preamble 8, Ethernet header 14, IP header 20, UDP header 8, InfiniBand's base
/// transport header 12, invariant CRC 4, frame check sequence 4, interframe gap 12. Sources: IEEE 802.3, RFC 791, RFC
/// 768, InfiniBand's annex for RoCEv2. eRPC on Ethernet has the same overhead: eRPC's header of 16 bytes replaces the
/// base transport header and the invariant CRC.
pub const PACKET: u64 = 8 + 14 + 20 + 8 + 12 + 4 + 4 + 12;
/// Maximum payload of a packet in bytes: InfiniBand's largest MTU that fits Ethernet's usual 1500 bytes.
pub const PACKET_MAX: u64 = 1_024;
/// Size in bytes of an op's header: address 8, key 4, length 4 (InfiniBand's RETH). PRISM (section 4.2) adds flags to
/// the base header, which take no byte.
pub(crate) const OP: u64 = 16;
/// Size in bytes of the second address of a redirected or data-indirect op.
const ADDRESS: u64 = 8;
/// Size in bytes of an acknowledgement's header (InfiniBand's AETH).
pub(crate) const ACKNOWLEDGEMENT: u64 = 4;

/// Returns the number of bytes on the wire of a message of `bytes` bytes, in packets of [`PACKET_MAX`].
pub const fn framed(bytes: u64) -> u64 {
    framed_in(bytes, PACKET_MAX)
}

/// Returns the number of bytes on the wire of a message of `bytes` bytes, in packets of at most `packet_max`.
pub const fn framed_in(bytes: u64, packet_max: u64) -> u64 {
    let packets = bytes.div_ceil(packet_max);
    bytes + PACKET * if packets == 0 { 1 } else { packets }
}

/// Returns the number of bytes on the wire of an op that has `addresses` addresses besides its own and `payload` bytes
/// of operands, if a NIC receives it.
pub const fn op_len(addresses: u64, payload: u64) -> u64 {
    framed(OP + ADDRESS * addresses + payload)
}

/// Returns the number of bytes on the wire of a NIC's response to an op with `output` bytes of output.
pub const fn answer_len(output: u64) -> u64 {
    framed(ACKNOWLEDGEMENT + output)
}

/// Returns the number of trailing READs of new buffers' addresses that a chain needs if its client reports garbage: one
/// for each buffer that a reclaiming CAS of the chain installs or retires.
pub fn trailing_reads(chain: ChainView<'_>) -> u64 {
    let reclaiming = chain.ops().filter(|op| op.has(flag::RECLAIMING)).count();
    reclaiming.min(chain.allocates()) as u64
}

/// Returns the bytes on the wire of a request with these ops and with `trailing` READs after them. A CPU receives one
/// message; a NIC receives one packet per op.
pub fn request_bytes<'c>(ops: impl Iterator<Item = OpView<'c>>, trailing: u64, is_one_sided: bool) -> u64 {
    let of_op = ops.map(|op| {
        let addresses = u64::from(op.redirect().is_some()) + u64::from(op.source().is_some());
        (addresses, op.header().payload_len() as u64)
    });
    let of_op = of_op.chain((0..trailing).map(|_| (0, 0)));
    if is_one_sided {
        return of_op.map(|(addresses, payload)| op_len(addresses, payload)).sum();
    }
    framed(of_op.map(|(addresses, payload)| OP + ADDRESS * addresses + payload).sum())
}

/// Returns the bytes on the wire of a response with outputs of these lengths, and with those of `trailing` READs of an
/// address. A NIC sends at least an acknowledgement.
pub fn answer_bytes(outputs: impl Iterator<Item = u64>, trailing: u64, is_one_sided: bool) -> u64 {
    let outputs = outputs.filter(|&len| len > 0).chain((0..trailing).map(|_| ADDRESS));
    if !is_one_sided {
        return framed(outputs.sum());
    }
    let answers: u64 = outputs.map(answer_len).sum();
    if answers > 0 { answers } else { answer_len(0) }
}

/// Access of a chain that takes time. An access that depends on an earlier access starts after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A read of the node's memory.
    Read,
    /// A write of the node's memory.
    Write,
    /// An atomic on the word at this address.
    Atomic(u64),
    /// Access to scratch or to a free list's head. A NIC has them in its own memory, and a CPU in its cache.
    OnChip,
}

/// Calls `tell` with each access of those ops of an executed chain that count, in order. Returns the number of bytes
/// that these ops moved.
pub fn accesses(
    chain: ChainView<'_>,
    counts: impl Fn(&OpView<'_>) -> bool,
    reply: &Reply,
    mut tell: impl FnMut(Access),
) -> u64 {
    let at = |place: Addr, access: Access| match place.scratch_offset() {
        Some(_) => Access::OnChip,
        None => access,
    };
    let mut moved = 0;
    for (index, (op, status)) in chain.ops().zip(reply.statuses()).enumerate() {
        if matches!(status, Status::Skipped | Status::Aborted | Status::NotReady) || !counts(&op) {
            continue;
        }
        let target = if op.has(flag::TARGET_INDIRECT) {
            tell(at(op.target(), Access::Read));
            Addr::NULL // Any address in the node's memory.
        } else {
            op.target()
        };
        if let Some(source) = op.source() {
            tell(at(source, Access::Read));
        }
        match op.code() {
            Code::Read => tell(at(target, Access::Read)),
            Code::Write => tell(at(target, Access::Write)),
            Code::Allocate => {
                tell(Access::OnChip);
                tell(Access::Write);
            }
            Code::Cas | Code::FetchAdd => tell(at(target, Access::Atomic(target.raw()))),
            Code::Retire => {}
        }
        if let Some(to) = op.redirect() {
            tell(at(to, Access::Write));
        }
        moved += op.header().payload_len() as u64 + reply.output(index).len() as u64;
    }
    moved
}
