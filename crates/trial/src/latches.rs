//! Short schedules of latched objects: a few clients, one or two objects and a NIC, without a node, a network or
//! faults.
//!
//! A schedule takes a few hundred events, so that tests try many thousands of them. The NIC is that of all trials
//! ([`farside_sim::nic`]), and the checks are those of the family of latched objects.
//!
//! Invariant: the same scheme and seed give the same schedule.

use crate::latch::{Holders, How, PATIENCE, Wrong, drawn_backoff, drawn_spec, perform};
use farside_remote::control::Store;
use farside_remote::{NodeId, Width};
use farside_sim::checker::Checker;
use farside_sim::counter::Counters;
use farside_sim::fabric::verbs::Verbs;
use farside_sim::hardware::PACKET_MAX;
use farside_sim::history::counter::{Ask, History, Operation, Outcome as Found};
use farside_sim::memory::{Bytes, Seen};
use farside_sim::nic::{Device, Nic, Step, Timing};
use farside_sim::random::Random;
use farside_sim::world::{Nanos, SECONDS, World, within};
use farside_systems::latch::system::LatchKind;
use farside_systems::latch::{self, LatchError, Latched, Scheme, Spec};
use farside_systems::store::Members;
use farside_systems::system::{Backoff, Options, System};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

const NODE: NodeId = NodeId(0);
/// Address of the objects in the node's memory.
pub const AT: u64 = 4 << 20;
/// Size of the node's memory.
const MEMORY: u64 = 8 << 20;
/// Latency of a verb in each direction, in nanoseconds.
pub const FLIGHT: Nanos = 500;
/// Timing of a NIC that takes no time but for the flight of verbs.
pub const AT_ONCE: Timing = Timing {
    flight_ns: FLIGHT,
    flight_spread_ns: 0,
    link_gbit: 0,
    op_ps: 0,
    lists_are_ops: false,
    packet_max: PACKET_MAX,
    fetch_ns: 0,
    fetch_spread_ns: 0,
    land_spread_ns: 0,
    atomic_ns: 0,
    slot_ns: 0,
    slot_spread_ns: 0,
    on_chip_ns: 0,
    slot_mask: 0xfff,
    relaxed: false,
};

/// Memory in which schedules run one after the other.
pub struct Bench {
    bytes: Rc<Bytes>,
}

/// Outcome of a schedule.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Parameters of the store.
    pub spec: Option<Spec>,
    /// Violations, one sentence for each.
    pub violated: Vec<String>,
    /// Number of operations.
    pub operations: usize,
    /// Number of attempts that failed, to take a latch or to read an object whole.
    pub retries: u64,
    /// Number of READs whose lines were not a snapshot of one instant.
    pub torn_reads: u64,
    /// Number of operations whose futures were dropped.
    pub dropped: u64,
    /// Number of events.
    pub events: u64,
}

/// Connects a client with the NIC.
pub fn connect(world: &World, nic: &Nic, device: Device) -> Verbs {
    Verbs::without_calls(world, NODE, nic.connect(), device)
}

/// Returns the description of a store with these parameters, at the place where schedules have it.
pub fn store(spec: &Spec) -> Store {
    Store {
        name: "s".to_owned(),
        kind: latch::KIND.to_owned(),
        parameters: serde_json::to_string(spec).expect("plain data"),
        quota: MEMORY,
        incarnation: 1,
        region: 1,
        secret: 1,
        table_at: AT,
        table_len: MEMORY - AT,
        wide: false,
        created: 0,
        id: 1,
        former: None,
        membership: None,
    }
}

/// Opens a client of the store with these parameters.
pub async fn open(fabric: Verbs, spec: &Spec, options: &Options) -> Latched<Verbs> {
    let members = Members::one(NODE, store(spec));
    LatchKind::open(fabric, &members, options).await.expect("the parameters are valid")
}

impl Default for Bench {
    fn default() -> Bench {
        Bench { bytes: Rc::new(Bytes::new(MEMORY)) }
    }
}

impl Bench {
    /// Creates a world with a NIC on this memory, which is all zero where stores lie.
    pub fn world(&self, seed: u64, timing: Timing, spec: &Spec) -> (World, Nic) {
        let zeros = vec![0; LatchKind::table_len(spec) as usize];
        self.bytes.poke(AT, &zeros);
        let world = World::new(seed);
        let nic = Nic::new(&world, &self.bytes, timing);
        (world, nic)
    }

    /// The memory.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Runs the schedule of a seed.
    pub fn run(&self, scheme: Scheme, seed: u64) -> Outcome {
        let draws = Random::new(seed).fork();
        let spec = drawn_spec(&draws, Some(scheme), draws.between(1, 2), &[16, 104, 160, 200]);
        // A line may be late by several round trips, so that a writer's whole operation fits in between.
        let any = || [4, 60, 900, 4_000][draws.below(4) as usize];
        let timing = Timing {
            flight_spread_ns: any(),
            fetch_spread_ns: any(),
            land_spread_ns: any(),
            slot_spread_ns: any(),
            relaxed: spec.relaxed,
            ..AT_ONCE
        };
        let turns = draws.between(2, 4);
        let has_drops = draws.one_in(4);
        let act = |draws: &Random| Act {
            object: draws.below(spec.objects),
            is_add: draws.one_in(2),
            how: How::drawn(draws),
            dropped_after: (has_drops && draws.one_in(3)).then(|| draws.heavy(2 * FLIGHT)),
        };
        let actor = |draws: &Random| Actor {
            begins_ns: draws.heavy(FLIGHT),
            acts: (0..turns).map(|_| act(draws)).collect(),
            backoff: drawn_backoff(draws, 2 * FLIGHT),
        };
        let actors = (0..draws.between(2, 3)).map(|_| actor(&draws)).collect();
        self.play(spec, Story { seed, timing, actors, late: None })
    }

    /// Runs a schedule.
    fn play(&self, spec: Spec, Story { seed, timing, actors, late }: Story) -> Outcome {
        let (world, nic) = self.world(seed, timing, &spec);
        let seen: Rc<Cell<Seen>> = Rc::default();
        nic.count_in(&seen);
        if let Some(late) = late {
            nic.direct(late);
        }
        let device = Device { timing, has_masked_cas: false, has_on_chip_words: false };
        let trial = Rc::new(Trial::default());
        for (client, actor) in actors.into_iter().enumerate() {
            let fabric = connect(&world, &nic, device);
            trial.running.set(trial.running.get() + 1);
            let (trial, theirs) = (Rc::clone(&trial), world.clone());
            world.spawn(world.start_process(), async move {
                trial.act(&theirs, client as u32, fabric, &spec, actor).await;
                trial.running.set(trial.running.get() - 1);
            });
        }
        world.run_while(SECONDS, || trial.running.get() > 0 && trial.violated.borrow().is_empty());
        if trial.running.get() > 0 && trial.violated.borrow().is_empty() {
            trial.blame("an operation does not end".to_owned());
        }
        self.finish(&world, connect(&world, &nic, device), &spec, &trial);
        let outcome = Outcome {
            spec: Some(spec),
            operations: trial.history.borrow().operations().len(),
            retries: trial.retries.get(),
            torn_reads: seen.get().torn_reads,
            dropped: trial.dropped.get(),
            events: world.events(),
            violated: trial.violated.take(),
        };
        world.end();
        outcome
    }

    /// Checks what is left, and the history: no latch is held, and no addition is lost.
    fn finish(&self, world: &World, fabric: Verbs, spec: &Spec, trial: &Rc<Trial>) {
        if !trial.violated.borrow().is_empty() {
            return;
        }
        let held = latch::held(&store(spec), |at| self.bytes.load(at, Width::W8) as u64);
        let held = held.expect("the parameters are valid");
        if !held.is_empty() {
            return trial.blame(format!("latches are held (object, word): {held:x?}"));
        }
        let read = |object| Act { object, is_add: false, how: How::default(), dropped_after: None };
        let acts = (0..spec.objects).map(read);
        let actor = Actor { begins_ns: 0, acts: acts.collect(), backoff: Backoff::NONE };
        let (theirs, reader, spec) = (Rc::clone(trial), world.clone(), *spec);
        let done = world.complete(SECONDS, async move {
            theirs.act(&reader, u32::MAX, fabric, &spec, actor).await;
        });
        if done.is_none() {
            trial.blame("reading all objects does not end".to_owned());
        }
        let history = trial.history.borrow();
        trial.violated.borrow_mut().extend(Counters.check(&history).violated);
        for object in 0..spec.objects {
            let mut operations = history.operations().iter().filter(|operation| operation.key == object);
            let adds =
                |operation: &&Operation| operation.ask != Ask::Read && operation.outcome != Found::Failed;
            let maybe = |operation: &&Operation| operation.outcome == Found::Unknown;
            let added = operations.clone().filter(adds).count() as u64;
            let dropped = operations.clone().filter(adds).filter(maybe).count() as u64;
            let last = operations.next_back();
            let Some(Found::Found(found)) = last.map(|operation| operation.outcome) else { continue };
            if !(added - dropped..=added).contains(&found.count) {
                trial.blame(format!(
                    "object {object} has the count {} after {added} additions, of which {dropped} were dropped",
                    found.count
                ));
            }
        }
    }
}

/// Actors and the times of a NIC's steps.
struct Story {
    seed: u64,
    timing: Timing,
    actors: Vec<Actor>,
    late: Option<Late>,
}

/// Returns by how many nanoseconds a step is late.
pub type Late = Box<dyn FnMut(Step) -> Nanos>;

/// A client with its operations.
struct Actor {
    /// Virtual time, in nanoseconds, at which the first operation begins.
    begins_ns: Nanos,
    acts: Vec<Act>,
    backoff: Backoff,
}

/// An operation.
#[derive(Clone, Copy)]
struct Act {
    object: u64,
    is_add: bool,
    how: How,
    /// Time, in nanoseconds, after which its future is dropped, unless it has ended.
    dropped_after: Option<Nanos>,
}

/// Operations of a schedule, and what they found.
#[derive(Default)]
struct Trial {
    history: RefCell<History>,
    holders: Holders,
    violated: RefCell<Vec<String>>,
    retries: Cell<u64>,
    running: Cell<u32>,
    tags: Cell<u64>,
    /// Number of operations whose futures were dropped.
    dropped: Cell<u64>,
}

impl Trial {
    fn blame(&self, violation: String) {
        self.violated.borrow_mut().push(violation);
    }

    /// Carries out the operations of an actor, and waits until all their requests have completed.
    async fn act(&self, world: &World, client: u32, fabric: Verbs, spec: &Spec, actor: Actor) {
        let (backoff, patience) = (Some(actor.backoff), Some(PATIENCE));
        let options = Options { entropy: world.random().bits(), backoff, patience, ..Options::NONE };
        let mut latched = open(fabric, spec, &options).await;
        // The clients of most schedules need no task.
        let is_kept = Rc::new(Cell::new(actor.acts.iter().any(|act| act.dropped_after.is_some())));
        if is_kept.get() {
            let (keeper, is_kept) = (latched.keeper(), Rc::clone(&is_kept));
            world.spawn(world.start_process(), async move {
                keeper.await.expect("the NIC executes every verb");
                is_kept.set(false);
            });
        }
        world.sleep(actor.begins_ns).await;
        for act in actor.acts {
            self.turn(world, client, &mut latched, act).await;
        }
        if let Err(error) = latched.settle().await {
            self.blame(error.to_string());
        }
        self.retries.set(self.retries.get() + latched.retries());
        drop(latched);
        while is_kept.get() {
            world.sleep(FLIGHT).await;
        }
    }

    async fn turn(&self, world: &World, client: u32, latched: &mut Latched<Verbs>, act: Act) {
        let Act { object, is_add, how, dropped_after } = act;
        self.tags.set(self.tags.get() + u64::from(is_add));
        let ask = if is_add { Ask::Add(self.tags.get()) } else { Ask::Read };
        let id = self.history.borrow_mut().call(client, object, ask, world.now());
        let operation = perform(world, latched, &self.holders, (object, ask), how);
        let performed = match dropped_after {
            Some(ns) => within(world, ns, operation).await,
            None => Some(operation.await),
        };
        let Some(performed) = performed else {
            return self.dropped.set(self.dropped.get() + 1); // It has no outcome.
        };
        let found = match performed {
            Ok(value) => Found::Found(value),
            Err(Wrong::Error(LatchError::Busy)) => Found::Failed,
            Err(Wrong::Error(error)) => return self.blame(error.to_string()),
            Err(Wrong::Violation(violation)) => return self.blame(violation),
        };
        self.history.borrow_mut().returned(id, found, world.now());
    }
}

/// A schedule that a test has chosen: which client does what and when, and which steps of the NIC are late.
///
/// Each verb takes [`FLIGHT`] in each direction, and the NIC executes it at once, except for the late steps.
pub struct Chosen {
    /// Parameters of the store. Object 0 is used.
    pub spec: Spec,
    /// The operations: when each begins in nanoseconds, whether it adds or reads, and for how many nanoseconds it holds
    /// the latch. Each has a client of its own.
    pub operations: Vec<(Nanos, Does)>,
    /// Returns by how many nanoseconds a step is late.
    pub late: Late,
    /// Seed of the order in which the lines of a WRITE land, if they land in any order.
    pub seed: u64,
}

/// An operation of a schedule that a test has chosen.
#[derive(Clone, Copy, Debug)]
pub enum Does {
    /// Adds one, and holds the latch for this many nanoseconds.
    Adds(Nanos),
    /// Reads as the scheme does.
    Reads,
    /// Reads under the latch, and holds it for this many nanoseconds.
    ReadsShared(Nanos),
}

impl Bench {
    /// Runs a chosen schedule.
    pub fn run_chosen(&self, Chosen { spec, operations, late, seed }: Chosen) -> Outcome {
        let actor = |(begins_ns, does)| {
            let (is_add, dwell_ns, is_shared) = match does {
                Does::Adds(dwell_ns) => (true, dwell_ns, false),
                Does::Reads => (false, 0, false),
                Does::ReadsShared(dwell_ns) => (false, dwell_ns, true),
            };
            let act = Act { object: 0, is_add, how: How { dwell_ns, is_shared }, dropped_after: None };
            Actor { begins_ns, acts: vec![act], backoff: Backoff::NONE }
        };
        let actors = operations.into_iter().map(actor).collect();
        let timing = Timing { relaxed: spec.relaxed, ..AT_ONCE };
        self.play(spec, Story { seed, timing, actors, late: Some(late) })
    }
}
