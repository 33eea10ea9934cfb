//! The papers' micro-benchmarks. The hardware model ([`crate::hardware`]) is calibrated on figure 1 and section 4, and
//! predicts figure 2. The benchmarks are:
//!
//! - PRISM, figures 1 and 2: one op at a time on a platform.
//! - *Synchronization*, section 4: many workers whose atomics one NIC executes.

use crate::fabric::hardware::{Client, Machine, Setup, start_node};
use crate::hardware::{Distance, INPUTS, Platform, Testbed};
use crate::memory::Bytes;
use crate::nic::{Nic, Sender, Verb};
use crate::world::{MICROS, MILLIS, Nanos, SECONDS, World};
use farside_remote::arena::class::Class;
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::service::{Extent, Kind, Plan, Service};
use farside_remote::{
    Addr, BoundedPtr, ChainBuf, Fabric, FabricError, Memory, Mode, NodeId, Reply, Status, allocate, cas,
    read, read_as, write,
};
use std::cell::Cell;
use std::rc::Rc;
use zerocopy::IntoBytes;

/// Operation that PRISM's figure 1 measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MicroOp {
    /// READ of 512 bytes at a known address.
    Read,
    /// WRITE of 512 bytes.
    Write,
    /// READ of 512 bytes through a pointer.
    IndirectRead,
    /// ALLOCATE of a buffer of 512 bytes.
    Allocate,
    /// CAS of 16 bytes with an arithmetic comparison (`<=`), which PRISM adds.
    EnhancedCas,
    /// Replacement for an indirect READ on a platform without PRISM: a READ of the pointer, then a READ of 512 bytes.
    TwoReads,
}

impl MicroOp {
    /// The operations of PRISM's figure 1, in its order.
    pub const FIGURE_1: [MicroOp; 5] =
        [MicroOp::Read, MicroOp::Write, MicroOp::IndirectRead, MicroOp::Allocate, MicroOp::EnhancedCas];

    /// Name of the operation in reports.
    pub const fn name(self) -> &'static str {
        match self {
            MicroOp::Read => "READ",
            MicroOp::Write => "WRITE",
            MicroOp::IndirectRead => "indirect READ",
            MicroOp::Allocate => "ALLOCATE",
            MicroOp::EnhancedCas => "enhanced CAS",
            MicroOp::TwoReads => "2 x READ",
        }
    }
}

/// PRISM (SOSP 2021), figure 1, read off the plot: microseconds of each op over one cable, on the platforms of
/// [`Platform::ALL`]; `None` where the figure has no bar.
pub const FIGURE_1: [(MicroOp, [Option<f64>; 4]); 5] = [
    (MicroOp::Read, [Some(2.5), Some(5.3), Some(2.5), Some(11.7)]),
    (MicroOp::Write, [Some(1.9), Some(5.0), Some(1.9), Some(12.7)]),
    (MicroOp::IndirectRead, [None, Some(5.0), Some(3.1), Some(14.9)]),
    (MicroOp::Allocate, [None, Some(5.3), Some(1.9), Some(12.7)]),
    (MicroOp::EnhancedCas, [None, Some(5.0), Some(2.5), Some(14.6)]),
];

/// PRISM, figure 2, read off the plot: microseconds of an indirect READ in a rack, a cluster and a data centre. For a
/// platform without indirect READs: microseconds of two READs. Not used for calibration.
pub const FIGURE_2: [(Platform, MicroOp, [f64; 3]); 4] = [
    (Platform::Rdma, MicroOp::TwoReads, [6.1, 10.9, 52.9]),
    (Platform::PrismSw, MicroOp::IndirectRead, [5.8, 8.1, 29.2]),
    (Platform::PrismHw, MicroOp::IndirectRead, [3.1, 5.4, 26.3]),
    (Platform::BlueField, MicroOp::IndirectRead, [12.4, 14.6, 35.7]),
];

/// Number of bytes that each measured op moves (PRISM, figure 1).
const LEN: usize = 512;

/// Returns the latency, in nanoseconds, of an op on an idle machine of PRISM's micro-benchmarks at `distance`, or
/// `None` if the platform cannot execute the op.
pub fn latency(op: MicroOp, platform: Platform, distance: Distance) -> Option<Nanos> {
    let world = World::new(1);
    let kinds = Rc::new(|| vec![Box::new(Plain) as Box<_>]);
    let setup = Setup::new(platform, Testbed { distance, ..Testbed::PRISM_MICRO });
    let node = start_node(&world, NodeId(0), kinds, 16 << 20, &setup);
    let theirs = world.clone();
    let took = world.complete(SECONDS, async move {
        let ask = Ask::CreateStore {
            name: "plain".to_owned(),
            kind: Kind::<crate::memory::Replay>::name(&Plain).to_owned(),
            parameters: String::new(),
            quota: 4 << 20,
        };
        node.answer(ask).await.expect("the node has enough memory");
        let opened = node.answer(Ask::OpenStore { name: "plain".to_owned() }).await;
        let Ok(Answer::Store(store)) = opened else { panic!("the store exists: {opened:?}") };
        let machine = Machine::open(&node, setup).await.expect("the node is running");
        let client = machine.connect();
        let prepared = Prepared::new(&node.memory(), &store);
        // The first run makes the NIC cache the connection; the second one is measured.
        let mut took = None;
        for _ in 0..2 {
            let since = theirs.now();
            took = prepared.run(&client, op).await.ok().map(|()| theirs.now() - since);
        }
        took
    });
    world.end();
    took.flatten()
}

/// Store whose table starts with a bounded pointer. The bytes that the pointer refers to are in the same table.
struct Prepared {
    extent: Extent,
}

const DATA: u64 = 4_096;

impl Prepared {
    fn new(bytes: &Bytes, store: &Store) -> Prepared {
        let extent = store.extent();
        let pointer =
            BoundedPtr { ptr: Addr::new(extent.at + DATA), bound: (LEN as u32).into(), tag: 0.into() };
        bytes.poke(extent.at, pointer.as_bytes());
        Prepared { extent }
    }

    async fn run(&self, client: &Client, op: MicroOp) -> Result<(), FabricError> {
        let (pointer, data) = (Addr::new(self.extent.at), Addr::new(self.extent.at + DATA));
        let (mut buf, mut reply, payload) = (ChainBuf::new(), Reply::new(), [7; LEN]);
        let (compare, swap) = ([0u64; 2], [1u64; 2]);
        let mut chain = buf.begin(self.extent.key);
        let class = Class::for_len(LEN).expect("buffers are larger");
        let reads = |at: Addr| read(at, LEN as u32);
        match op {
            MicroOp::Read => _ = chain.also(reads(data)),
            MicroOp::Write => _ = chain.also(write(data, &payload)),
            MicroOp::IndirectRead => _ = chain.also(reads(pointer).indirect().bounded()),
            MicroOp::Allocate => _ = chain.also(allocate(class.list(), [&payload, &[], &[]])),
            MicroOp::EnhancedCas => _ = chain.also(cas(Mode::Le, data, &compare, &swap)),
            MicroOp::TwoReads => _ = chain.also(read_as::<u64>(pointer)),
        }
        client.run(NodeId(0), &chain, &mut reply).await?;
        assert!(matches!(reply.last_status(), Status::Ok | Status::CasFailed), "{op:?} runs: {reply:?}");
        if op == MicroOp::TwoReads {
            let mut chain = buf.begin(self.extent.key);
            let _ = chain.also(reads(data));
            client.run(NodeId(0), &chain, &mut reply).await?;
        }
        Ok(())
    }
}

/// Kind of the benchmark's store, which has a table of bytes, and buffers.
struct Plain;

impl<M: Memory> Kind<M> for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn plan(&self, parameters: &str, _quota: u64, _entropy: u64) -> Result<Plan, String> {
        Ok(Plan { table_len: 1 << 16, parameters: parameters.to_owned(), wide: false })
    }

    fn serve(&self, _parameters: &str, _table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(Plain))
    }
}

impl<M: Memory> Service<M> for Plain {
    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None)
    }
}

/// Workers that repeatedly execute one verb. Each worker has its own word of 8 bytes, or all share one, and has one
/// verb in flight at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workers {
    /// Number of workers, spread over the machines of [`Testbed::SYNCHRONIZATION`].
    pub workers: u32,
    /// Distance in bytes between the words of successive workers; 0 if they share one word.
    pub stride: u64,
    /// Whether the workers execute CAS; if not, they execute READ.
    pub is_atomic: bool,
}

impl Workers {
    /// Returns workers that execute CAS. `stride` is the distance in bytes between their words.
    pub const fn cas(workers: u32, stride: u64) -> Workers {
        Workers { workers, stride, is_atomic: true }
    }

    /// Returns workers that execute READ. `stride` is the distance in bytes between their words.
    pub const fn read(workers: u32, stride: u64) -> Workers {
        Workers { workers, stride, is_atomic: false }
    }
}

/// *Synchronization* (SIGMOD 2023), section 4: the throughputs that its text states. Each entry has a description, the
/// workers, and the throughput in million verbs per second.
pub const SECTION_4: [(&str, Workers, f64); 7] = [
    ("CAS, 64 bytes apart, 128 workers", Workers::cas(128, 64), 51.2),
    ("READ of 8 bytes, 128 workers", Workers::read(128, 64), 51.2),
    ("CAS, one word, 8 workers", Workers::cas(8, 0), 2.32),
    ("CAS, one word, 128 workers", Workers::cas(128, 0), 2.32),
    ("CAS, 256 bytes apart, 128 workers", Workers::cas(128, 256), 40.0),
    ("CAS, 512 bytes apart, 128 workers", Workers::cas(128, 512), 25.6),
    ("CAS, 4 KiB and 8 bytes apart, 128 workers", Workers::cas(128, 4_096 + 8), 51.2),
];

/// Returns the throughput of one NIC in million verbs per second. Each worker has its own connection.
pub fn mverbs(workers: Workers) -> f64 {
    const WARM_UP: Nanos = 50 * MICROS;
    const MEASURED: Nanos = MILLIS / 2;
    /// Address of the first worker's word.
    const AT: u64 = 1 << 20;
    let world = World::new(1);
    let bytes = Rc::new(Bytes::new(16 << 20));
    let testbed = Testbed::SYNCHRONIZATION;
    let nic = Nic::new(&world, &bytes, INPUTS.timing(testbed));
    let senders: Vec<Rc<Sender>> = (0..testbed.machines).map(|_| Rc::new(INPUTS.sender())).collect();
    let done = Rc::new(Cell::new(0u64));
    for worker in 0..workers.workers {
        let connection = nic.connect_from(&senders[(worker % testbed.machines) as usize], worker);
        let (theirs, count) = (world.clone(), Rc::clone(&done));
        let at = AT + u64::from(worker) * workers.stride;
        world.spawn(world.start_process(), async move {
            loop {
                let verb = match workers.is_atomic {
                    true => Verb::cas(at, 0, 1),
                    false => Verb::Read { at, len: 8 },
                };
                connection.post(verb, false).complete().await;
                count.set(count.get() + u64::from(theirs.now() > WARM_UP));
            }
        });
    }
    world.run_until(WARM_UP + MEASURED);
    world.end();
    done.get() as f64 * MICROS as f64 / MEASURED as f64
}
