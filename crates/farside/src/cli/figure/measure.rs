//! Measures a figure over a real fabric: starts a node, and measures the figure's systems or ops alternately on that
//! node.

use super::{doubling, listed};
use crate::cli::Failure;
use crate::cli::bench::{FabricArg, Rounds, Session, SessionConfig, TURN, far};
use farside::figure::ratio::{Loaded, Measurement, Runner};
use farside::figure::{ByLength, Figure, OnFabrics, Ops, Stores};
use farside::parts::{AnyKv, Endpoint};
use farside_bench::workload::{self, Distribution, Workload};
use farside_fabrics::executor::block_on;
use farside_fabrics::layer::delay::{self, Delay};
use farside_remote::arena::class::Class;
use farside_remote::{
    Addr, BoundedPtr, ChainBuf, Fabric, Key, Mode, NodeId, Reply, Status, allocate, cas, read, read_as, write,
};
use farside_sim::hardware::Distance;
use farside_sim::micro::MicroOp;
use farside_systems::kv::prism_kv;
use farside_systems::registry::OneKv;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The plan of a figure's measurement.
pub(super) struct Measure {
    pub(super) figure: &'static Figure,
    pub(super) fabric: FabricArg,
    /// Network distance to add to the fabric's own; `None` for the figure's default.
    pub(super) distance: Option<Distance>,
    /// Number of rounds. Each round measures each system or op once.
    pub(super) rounds: u32,
    /// Maximum number of clients under load.
    pub(super) clients: u32,
    /// Number of records in each store under load; `None` for the figure's default.
    pub(super) records: Option<u64>,
}

/// Default number of records in each store whose values have one length.
const RECORDS: u64 = 100_000;

/// Size of a value, and number of bytes that an op moves: 512 bytes (PRISM, figure 1 and section 6.2).
const LEN: usize = 512;
const NODE: NodeId = NodeId(0);

impl Measure {
    /// Starts a node, and measures the figure on it.
    ///
    /// # Errors
    /// The figure cannot be measured on a real fabric, there is not enough memory for the node, or an operation failed.
    pub(super) fn run(&self) -> Result<Measurement, Failure> {
        match &self.figure.fabrics {
            OnFabrics::Ops(ops) => self.ops(ops),
            OnFabrics::Stores(stores) => self.stores(stores),
            OnFabrics::ByLength(lengths) => self.lengths(lengths),
            OnFabrics::Nothing(about) => Err(Failure::Error(format!(
                "{} is about {about}, which {} does not have: omit --fabric to have the figure predicted; {} can be \
                 measured",
                self.figure.name,
                self.fabric.name(),
                listed(|fabrics| !matches!(fabrics, OnFabrics::Nothing(_)), "and")
            ))),
        }
    }

    /// Measures the figure's systems, one store for each, with an increasing number of clients.
    fn stores(&self, stores: &Stores) -> Result<Measurement, Failure> {
        let distance = self.distance.unwrap_or(stores.distance);
        let records = self.records.unwrap_or(RECORDS);
        let config = |&system: &&str| self.config(system, stores.workload, records, self.clients);
        let sessions = Session::start_all(stores.systems.iter().map(config).collect::<Result<_, _>>()?)?;
        let mut rounds = Rounds::open(&sessions, self.clients, layer(distance))?;
        let mut loads = Vec::new();
        for clients in doubling(self.clients) {
            note!("measuring with {clients} clients ...");
            loads.push(Loaded { clients, rounds: rounds.measure(clients, self.rounds)? });
        }
        Ok(Measurement::of_stores(self.figure, stores, self.fabric.name(), self.runner(), distance, &loads))
    }

    /// Measures two systems with values of several lengths, whose keys follow Zipf's law or are equally likely.
    fn lengths(&self, lengths: &ByLength) -> Result<Measurement, Failure> {
        let distance = self.distance.unwrap_or(lengths.distance);
        let properties = lengths.properties.iter().map(|&property| property.to_owned()).collect::<Vec<_>>();
        let keys = [("Zipf", Distribution::Zipfian), ("uniform", Distribution::Uniform)];
        let mut measured = Vec::new();
        for (name, distribution) in keys {
            let mut by_length = Vec::new();
            for &(value_size, _) in lengths.lengths {
                let config = |system: &str| {
                    let mut workload = Workload::resolve_with("a", &properties)?;
                    workload.records = self.records.unwrap_or(lengths.records);
                    workload.distribution = distribution;
                    Ok::<_, Failure>(SessionConfig {
                        fabric: Some(self.fabric),
                        value_size,
                        // Bytes of the key and of the entry in the cache.
                        value_cache: lengths.cached * (value_size + 128),
                        tasks: self.clients,
                        collision_free: true,
                        quiet: true,
                        ..SessionConfig::new(
                            farside_predict::system(system).map_err(Failure::Error)?,
                            workload,
                        )
                    })
                };
                let [one, other] = lengths.systems;
                let sessions = Session::start_all(vec![config(one)?, config(other)?])?;
                note!("measuring values of {value_size} bytes, {name} ...");
                let mut rounds = Rounds::open(&sessions, self.clients, layer(distance))?;
                by_length.push(rounds.measure(self.clients, self.rounds)?);
            }
            measured.push((name, by_length));
        }
        Ok(Measurement::of_lengths(self.figure, lengths, self.fabric.name(), distance, &measured))
    }

    fn ops(&self, ops: &Ops) -> Result<Measurement, Failure> {
        let session = self.one_record()?;
        let endpoint = Rc::new(session.endpoint()?);
        let far = self.distance.map_or(ops.distances.to_vec(), |distance| vec![distance]);
        let bench = |&distance| OpBench::open(&session, &endpoint, distance);
        let mut benches = far.iter().map(bench).collect::<Result<Vec<_>, _>>()?;
        let mut measured: Vec<_> = far.into_iter().map(|distance| (distance, Vec::new())).collect();
        // Round 0 is the warm-up.
        for round in 0..=self.rounds {
            for (bench, (_, rounds)) in benches.iter_mut().zip(&mut measured) {
                let latencies = ops.ops.iter().map(|&op| bench.turn(op)).collect::<Result<Vec<_>, _>>()?;
                if round > 0 {
                    rounds.push(latencies);
                }
            }
        }
        Ok(Measurement::of_ops(self.figure, ops, self.fabric.name(), self.runner(), &measured))
    }

    /// Starts a node with a store of few records, for measurements of single ops.
    fn one_record(&self) -> Result<Session, Failure> {
        const RECORDS: u64 = 64;
        let session = Session::start(self.config(prism_kv::KIND, "c", RECORDS, 1)?)?;
        note!("measuring ops ...");
        Ok(session)
    }

    fn config(
        &self,
        system: &str,
        workload: &str,
        records: u64,
        clients: u32,
    ) -> Result<SessionConfig, Failure> {
        let mut workload = Workload::resolve(workload)?;
        (workload.records, workload.distribution) = (records, Distribution::Uniform);
        Ok(SessionConfig {
            fabric: Some(self.fabric),
            value_size: LEN,
            tasks: clients,
            // The paper's runs have no collisions either.
            collision_free: true,
            ..SessionConfig::new(farside_predict::system(system).map_err(Failure::Error)?, workload)
        })
    }

    fn runner(&self) -> Runner {
        match self.fabric {
            FabricArg::Local | FabricArg::Shm => Runner::Caller,
            _ => Runner::Engine,
        }
    }
}

/// Converts a simulated distance into a distance of the delay layer that adds the same round trip.
fn layer(distance: Distance) -> delay::Distance {
    let one_way = Duration::from_nanos(distance.round_trip_ns()) / 2;
    delay::Distance { one_way, ..delay::Distance::default() }
}

type Far = Rc<Delay<Rc<Endpoint>>>;

/// Measures single ops on a store. The ops read the slot and the item of one record, and write to a buffer that no
/// other client uses.
struct OpBench {
    fabric: Far,
    key: Key,
    slot: Addr,
    item: Addr,
    own: Addr,
    chain: ChainBuf,
    reply: Reply,
}

impl OpBench {
    fn open(session: &Session, endpoint: &Rc<Endpoint>, distance: Distance) -> Result<OpBench, Failure> {
        let fabric = Rc::new(far(endpoint, layer(distance)));
        let AnyKv::One(OneKv::PrismKv(kv)) = session.kv(&fabric)? else {
            panic!("the session created a PRISM-KV store")
        };
        let first = kv.table().probe(&workload::key(0)).next().expect("every key has a first probe");
        let (slot, key) = (kv.table().slot_at(first), kv.store().extent().key);
        let (chain, reply) = (ChainBuf::new(), Reply::new());
        let mut bench = OpBench { fabric, key, slot, item: Addr::NULL, own: Addr::NULL, chain, reply };
        let fabric = Rc::clone(&bench.fabric);
        block_on(&fabric, async {
            bench.item = bench.pointer().await?;
            bench.own = bench.allocate().await?;
            Ok::<_, Failure>(bench)
        })
    }

    /// Runs an op for [`TURN`] and returns its mean latency, in microseconds.
    fn turn(&mut self, op: MicroOp) -> Result<f64, Failure> {
        // Number of ops between two readings of the clock, because one reading takes as long as a READ of local memory.
        const OPS: u32 = 16;
        let fabric = Rc::clone(&self.fabric);
        block_on(&fabric, async {
            let (began, mut done) = (Instant::now(), 0);
            while began.elapsed() < TURN {
                for _ in 0..OPS {
                    self.run(op).await?;
                }
                done += OPS;
            }
            Ok(began.elapsed().as_secs_f64() * 1e6 / f64::from(done))
        })
    }

    async fn run(&mut self, op: MicroOp) -> Result<(), Failure> {
        let OpBench { fabric, key, slot, item, own, chain, reply } = self;
        let (payload, compare, swap) = ([7; LEN], [u64::MAX; 2], [1u64; 2]);
        let mut request = chain.begin(*key);
        match op {
            MicroOp::Read => _ = request.also(read(*item, LEN as u32)),
            MicroOp::Write => _ = request.also(write(*own, &payload)),
            MicroOp::IndirectRead => _ = request.also(read(*slot, LEN as u32).indirect().bounded()),
            // The comparison always holds, so every CAS swaps.
            MicroOp::EnhancedCas => _ = request.also(cas(Mode::Le, *own, &compare, &swap)),
            MicroOp::Allocate => {
                let fresh = self.allocate().await?;
                self.fabric.retire(NODE, self.key, fresh);
                return Ok(());
            }
            MicroOp::TwoReads => {
                let item = self.pointer().await?;
                let mut request = self.chain.begin(self.key);
                request.also(read(item, LEN as u32));
                self.fabric.run(NODE, &request, &mut self.reply).await?;
                return check_status(op, self.reply.last_status());
            }
        }
        fabric.run(NODE, &request, reply).await?;
        check_status(op, reply.last_status())
    }

    /// Reads the address of the record's item from its slot.
    async fn pointer(&mut self) -> Result<Addr, Failure> {
        let mut chain = self.chain.begin(self.key);
        let slot = chain.also(read_as::<BoundedPtr>(self.slot));
        self.fabric.run(NODE, &chain, &mut self.reply).await?;
        let slot = self.reply.get(slot).map_err(|status| failed(MicroOp::TwoReads, status))?;
        Ok(slot.ptr)
    }

    /// Allocates a buffer and returns its address, so that the caller can retire the buffer. As in the paper, ALLOCATE
    /// redirects the address to the scratch, and the chain then reads it from there.
    async fn allocate(&mut self) -> Result<Addr, Failure> {
        const FRESH: Addr = Addr::scratch(0);
        let (payload, class) = ([7; LEN], Class::for_len(LEN).expect("buffers are larger"));
        let mut chain = self.chain.begin(self.key);
        chain.also(allocate(class.list(), [&payload, &[], &[]]).redirect(FRESH));
        let fresh = chain.also(read_as::<Addr>(FRESH));
        self.fabric.run(NODE, &chain, &mut self.reply).await?;
        self.reply.get(fresh).copied().map_err(|status| failed(MicroOp::Allocate, status))
    }
}

fn check_status(op: MicroOp, status: Status) -> Result<(), Failure> {
    match status {
        Status::Ok => Ok(()),
        status => Err(failed(op, status)),
    }
}

fn failed(op: MicroOp, status: Status) -> Failure {
    Failure::Error(format!("{} failed during the measurement: {status}", op.name()))
}
