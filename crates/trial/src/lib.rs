//! One run of a system in the simulator, by one seed: a world, a node, clients at work, what goes wrong meanwhile, and
//! what was seen.
//!
//! Everything that is not asked for is drawn from the seed: how many clients there are and how they reach the node,
//! what they ask, when processes are stopped and killed. Invariant: the same setup and seed give the same history.

pub mod judge;

mod mishaps;
mod registers;
mod values;
mod work;

use farside_remote::NodeId;
use farside_remote::control::Ask;
use farside_remote::service::Kind;
use farside_sim::fabric::AnyFabric;
use farside_sim::fault::{Fault, Struck, Weather};
use farside_sim::history::History;
use farside_sim::memory::{Pace, Replay, Seen};
use farside_sim::network::{HostId, Network, Wire};
use farside_sim::node::{Kinds, Node, Options};
use farside_sim::random::Random;
use farside_sim::world::{MICROS, MILLIS, Nanos, ProcessId, SECONDS, World};
use farside_systems::kv::pilaf::service::PilafKind;
use farside_systems::kv::prism_kv::service::PrismKvKind;
use farside_systems::kv::{pilaf, prism_kv};
use registers::RegistersKind;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
#[cfg(farside_mutants)]
use {
    farside_fabrics::mutants as sessions, farside_node::mutants as lives, farside_remote::mutant::Mutant,
    farside_remote::mutants as chains,
};

/// The systems that can be tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// PRISM-KV.
    PrismKv,
    /// Pilaf.
    Pilaf,
    /// Registers, which are only here: what chains can do and the others do without.
    Registers,
}

impl System {
    /// All of them.
    pub const ALL: [System; 3] = [System::PrismKv, System::Pilaf, System::Registers];

    /// As flags and reports name it.
    pub const fn name(self) -> &'static str {
        match self {
            System::PrismKv => prism_kv::KIND,
            System::Pilaf => pilaf::KIND,
            System::Registers => registers::KIND,
        }
    }

    /// Whether clients ask no service: their chains do everything.
    const fn is_one_sided(self) -> bool {
        matches!(self, System::PrismKv | System::Registers)
    }

    /// The broken variants that its trials are to find.
    #[cfg(farside_mutants)]
    pub fn mutants(self) -> Vec<Mutant> {
        match self {
            System::PrismKv => {
                // The tests of single steps find two that hardly occur or show by chance: one takes a path whose every
                // slot is taken, the other a death between two exchanges and then a put of that very key.
                let rare = [prism_kv::mutants::END_SLOT_STAYS, prism_kv::mutants::MOVED_TWICE];
                let own = prism_kv::mutants::ALL.iter().copied().filter(|mutant| !rare.contains(mutant));
                own.chain([lives::OLD_TABLE_FREED_AT_ONCE]).collect()
            }
            System::Pilaf => pilaf::mutants::ALL.to_vec(),
            // The node's own tests find two that no client meets by chance: DROP_WITHOUT_TAKING_LISTS takes retired
            // buffers of two stores in one session, REUSE_WHILE_ADOPTING a death right after a reuse within a scan.
            System::Registers => vec![
                chains::UNUSED_RESERVATION_IS_KEPT,
                chains::SKIPPED_COUNTS_AS_SUCCESS,
                chains::LITTLE_ENDIAN_COMPARE,
                chains::SCRATCH_IS_NOT_ZEROED,
                chains::SHARED_SCRATCH,
                chains::NO_CLAMP,
                chains::POINTEE_IS_NOT_CHECKED,
                chains::RETIRE_WHAT_IS_NOT_LIVE,
                lives::REPOST_AT_ONCE,
                lives::SCAN_BY_REACHABILITY_ALONE,
                lives::SWEEP_WITHOUT_GRACE,
                sessions::DUPLICATE_RUNS_AGAIN,
                sessions::OLD_SESSION_LIVES,
            ],
        }
    }
}

/// How clients reach the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// Their own CPUs run chains on its memory, as over `shm`.
    Direct,
    /// By datagrams that may be lost, doubled and overtaken, as over `udp`.
    Datagrams,
    /// By connections that may break, as over `tcp` and `ring`.
    Connections,
}

impl Carrier {
    /// All of them.
    pub const ALL: [Carrier; 3] = [Carrier::Direct, Carrier::Datagrams, Carrier::Connections];

    /// As flags and reports name it.
    pub const fn name(self) -> &'static str {
        match self {
            Carrier::Direct => "direct",
            Carrier::Datagrams => "datagrams",
            Carrier::Connections => "connections",
        }
    }

    /// Whether such a fault can strike there.
    pub const fn can_have(self, fault: Fault) -> bool {
        match fault {
            Fault::Loss | Fault::Duplicate | Fault::Reorder => matches!(self, Carrier::Datagrams),
            Fault::Delay | Fault::Partition | Fault::OneWayPartition => !matches!(self, Carrier::Direct),
            Fault::Reset => matches!(self, Carrier::Connections),
            _ => true,
        }
    }
}

/// What is tried. What is not said is drawn from the seed.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Which system.
    pub system: System,
    /// How clients reach the node.
    pub carrier: Option<Carrier>,
    /// How many clients.
    pub clients: Option<u32>,
    /// How many keys they share.
    pub keys: Option<u64>,
    /// How many operations all of them carry out together.
    pub operations: Option<u32>,
    /// What may go wrong: of these, each seed has some.
    pub faults: Vec<Fault>,
}

impl Setup {
    /// Everything that is drawn, with every fault.
    pub fn of(system: System) -> Setup {
        Setup {
            system,
            carrier: None,
            clients: None,
            keys: None,
            operations: None,
            faults: Fault::ALL.to_vec(),
        }
    }
}

/// What a seed has made of a setup.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// The setup's.
    pub system: System,
    /// How clients reach the node.
    pub carrier: Carrier,
    /// How many of them there are, and how many operations each has under way at once.
    pub clients: u32,
    /// See [`Drawn::clients`].
    pub tasks: u32,
    /// How many keys they share.
    pub keys: u64,
    /// How many operations all of them carry out together.
    pub operations: u32,
    /// Of [`Setup::faults`], those that may strike.
    pub faults: Vec<Fault>,
    /// For how many items the store is made, and its quota in MiB.
    pub items: u64,
    /// See [`Drawn::items`].
    pub quota_mib: u64,
    /// The most bytes of a value, but of the large ones.
    pub value_max: u64,
    /// One value in so many is large.
    pub large_one_in: u64,
    /// How many slots each client remembers.
    pub slot_cache: usize,
    /// One operation in so many brings something about that happens to processes, hosts or stores.
    pub mishap_one_in: u64,
    /// One operation in so many has the node replace the store's table; none if 0.
    pub rebuild_one_in: u64,
    /// One operation in so many has the node look for lost buffers; none if 0.
    pub scan_one_in: u64,
}

impl Drawn {
    fn new(setup: &Setup, random: &Random) -> Drawn {
        let carrier = Carrier::ALL[random.below(3) as usize];
        let carrier = setup.carrier.unwrap_or(carrier);
        let clients = setup.clients.unwrap_or(random.between(2, 5) as u32);
        // So many keys that they stand in each other's way, and come to fill a table.
        let is_crowded = random.one_in(6);
        let keys = if is_crowded { random.between(100, 300) } else { random.between(1, 8) };
        let keys = setup.keys.unwrap_or(keys);
        // How hard it is to tell whether a key is a register grows fast with the operations on it.
        let operations = if is_crowded { random.between(400, 900) } else { random.between(60, 240) };
        let operations = operations.min(40 + 40 * keys) as u32;
        let operations = setup.operations.unwrap_or(operations);
        // Each seed has some of the faults: one that always strikes hides what others do.
        let is_calm = random.one_in(8);
        let faults = setup.faults.iter().copied().filter(|fault| carrier.can_have(*fault));
        let faults = faults.filter(|_| !random.one_in(2) && !is_calm).collect::<Vec<_>>();
        let is_short = faults.contains(&Fault::Exhaustion);
        Drawn {
            system: setup.system,
            carrier,
            clients,
            tasks: random.between(1, 3) as u32,
            keys,
            operations,
            faults,
            items: if is_crowded { 4 } else { random.between(keys, 4 * keys).max(4) },
            // Each size of buffers takes a segment.
            quota_mib: if is_short { 4 } else { 40 },
            value_max: [16, 200, 1500][random.below(3) as usize],
            // Pilaf has no values of several parts.
            large_one_in: if random.one_in(8) && setup.system == System::PrismKv { 40 } else { 0 },
            slot_cache: [0, 2, 16][random.below(3) as usize],
            mishap_one_in: [6, 20, 80][random.below(3) as usize],
            scan_one_in: [0, 0, 8, 40][random.below(4) as usize],
            rebuild_one_in: if setup.system == System::PrismKv {
                [0, 0, 5, 40][random.below(4) as usize]
            } else {
                0
            },
        }
    }
}

/// What came of a trial.
pub struct Report {
    /// What the seed made of the setup.
    pub drawn: Drawn,
    /// What clients asked and were answered.
    pub history: History,
    /// How often each fault has struck.
    pub struck: Rc<Struck>,
    /// What accesses have seen.
    pub seen: Seen,
    /// How often what is worth knowing has happened to operations.
    pub counts: Counts,
    /// How many events the world had, and how long it lasted.
    pub events: u64,
    /// See [`Report::events`].
    pub lasted: Nanos,
    /// What is wrong, whatever a checker says of the history.
    pub violation: Option<String>,
}

/// How often what is worth knowing has happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Sessions that were opened.
    pub sessions: u64,
    /// Operations of which nobody knows whether they were carried out.
    pub unknown: u64,
    /// That found no memory.
    pub out_of_memory: u64,
    /// That were refused, or lost before they ran.
    pub failed: u64,
    /// Conditional puts that lost.
    pub conflicts: u64,
    /// Tables that the last store has left behind.
    pub rebuilds: u64,
}

/// No trial lasts longer, nor so long for each of its operations: where every sixth of a lone client brings something
/// about, one takes 30 ms on average.
const LASTS_MAX: Nanos = 60 * SECONDS;
const OPERATION_LASTS_MAX: Nanos = 100 * MILLIS;

/// What all of a trial's parts share.
struct Scene {
    world: World,
    network: Network,
    node: Node,
    drawn: Drawn,
    struck: Rc<Struck>,
    history: RefCell<History>,
    counts: Cell<Counts>,
    violation: RefCell<Option<String>>,
    /// Operations that are still to be begun.
    left: Cell<u32>,
    /// The store that clients are to use: stores have different names, so that each is another history.
    store: Cell<u32>,
    /// Whether a client has opened that store, so that it is there.
    is_opened: Cell<bool>,
    /// The process of each client, and where it is.
    clients: RefCell<Vec<Option<ProcessId>>>,
    hosts: Vec<HostId>,
    /// Values that were written; each is written once.
    next_tag: Cell<u64>,
}

impl Scene {
    fn count(&self, add: impl FnOnce(&mut Counts)) {
        let mut counts = self.counts.get();
        add(&mut counts);
        self.counts.set(counts);
    }

    fn blame(&self, violation: String) {
        self.violation.borrow_mut().get_or_insert(violation);
    }

    fn store_name(&self) -> String {
        name_of(self.store.get())
    }

    /// Whether the node may have been too slow to hand out memory.
    fn has_node_stood_still(&self) -> bool {
        [Fault::NodePause, Fault::NodeRestart, Fault::NodeLoss].iter().any(|&fault| self.struck.of(fault) > 0)
    }

    fn is_over(&self) -> bool {
        self.left.get() == 0
    }
}

fn name_of(store: u32) -> String {
    format!("s{store}")
}

/// Runs a trial.
pub fn run(setup: &Setup, seed: u64) -> Report {
    let world = World::new(seed);
    let drawn = Drawn::new(setup, world.random());
    let struck = Rc::new(Struck::default());
    let wire = Wire { delay_ns: 2 * MICROS, jitter_ns: MICROS };
    let network = Network::new(&world, wire, &struck);
    let host = network.add_host();
    let hosts = (0..drawn.clients)
        .map(|_| match drawn.carrier {
            Carrier::Direct => host,
            _ => network.add_host(),
        })
        .collect();
    let first_look = [MICROS, 20 * MICROS, MILLIS / 4][world.random().below(3) as usize];
    let options = Options {
        memory_bytes: 128 << 20,
        look: [first_look, 8 * MILLIS],
        engines: if drawn.carrier == Carrier::Direct { 0 } else { world.random().between(1, 2) as u32 },
        is_reliable: drawn.carrier == Carrier::Connections,
        ..Options::default()
    };
    let kinds: Kinds = Rc::new(|| {
        vec![Box::new(PrismKvKind) as Box<dyn Kind<Replay>>, Box::new(PilafKind), Box::new(RegistersKind)]
    });
    let node = Node::start(&world, &network, host, NodeId(0), kinds, options);
    let scene = Rc::new(Scene {
        world: world.clone(),
        network,
        node,
        struck,
        history: RefCell::default(),
        counts: Cell::default(),
        violation: RefCell::new(None),
        left: Cell::new(drawn.operations),
        store: Cell::new(1),
        is_opened: Cell::new(false),
        clients: RefCell::new(vec![None; drawn.clients as usize]),
        hosts,
        next_tag: Cell::new(1),
        drawn,
    });
    create_store(&scene);
    for client in 0..scene.drawn.clients {
        work::employ(&scene, client);
    }
    mishaps::begin(&scene);
    let until = LASTS_MAX.max(u64::from(scene.drawn.operations) * OPERATION_LASTS_MAX);
    world.run_while(until, || !work::is_done(&scene));
    if !work::is_done(&scene) && scene.violation.borrow().is_none() {
        scene.blame(format!("{} operations were never begun, or never ended", scene.left.get()));
    }
    work::look_at_all(&scene);
    work::audit(&scene);
    let (events, lasted) = (world.events(), world.now());
    world.end();
    Report {
        history: scene.history.take(),
        struck: Rc::clone(&scene.struck),
        seen: scene.node.seen(),
        counts: scene.counts.get(),
        events,
        lasted,
        violation: scene.violation.take(),
        drawn: scene.drawn.clone(),
    }
}

/// The store that clients use is gone; has the node make the one that they are to use next.
fn create_next_store(scene: &Rc<Scene>) {
    scene.store.set(scene.store.get() + 1);
    scene.is_opened.set(false);
    create_store(scene);
}

/// Has the node make the store, and asks it again until a client has found it: it may die before it is made, or have
/// no room while the one before is still being dropped.
fn create_store(scene: &Rc<Scene>) {
    let items = scene.drawn.items;
    let parameters = match scene.drawn.system {
        System::PrismKv => format!("{{\"items\": {items}, \"placement\": \"hashed\"}}"),
        System::Pilaf => format!("{{\"items\": {items}}}"),
        System::Registers => String::new(),
    };
    let ask = Ask::CreateStore {
        name: scene.store_name(),
        kind: scene.drawn.system.name().to_owned(),
        parameters,
        quota: scene.drawn.quota_mib << 20,
    };
    scene.node.ask(ask);
    let (theirs, store) = (Rc::clone(scene), scene.store.get());
    scene.world.at(scene.world.now() + 5 * MILLIS, move || {
        if theirs.store.get() == store && !theirs.is_opened.get() && !theirs.is_over() {
            // It may have died before it dropped those.
            for before in 1..store {
                theirs.node.ask(Ask::DropStore { name: name_of(before) });
            }
            create_store(&theirs);
        }
    });
}

/// The weather of a trial.
fn weather(drawn: &Drawn) -> Weather {
    let one_in = |fault: Fault, often: u64| if drawn.faults.contains(&fault) { often } else { 0 };
    let foul = Weather::FOUL;
    Weather {
        loss_one_in: one_in(Fault::Loss, foul.loss_one_in),
        duplicate_one_in: one_in(Fault::Duplicate, foul.duplicate_one_in),
        reorder_one_in: one_in(Fault::Reorder, foul.reorder_one_in),
        delay_one_in: one_in(Fault::Delay, foul.delay_one_in),
        reset_one_in: one_in(Fault::Reset, foul.reset_one_in),
        late_ns: foul.late_ns,
    }
}

/// The pace of a trial's clients where they run chains themselves.
const PACE: Pace = Pace::CPU;

/// How long a client waits until it tries again to reach a node that it could not.
const AGAIN: Nanos = MILLIS;

/// A fabric that a client has, and whether it is worth keeping after an error.
type Fabric = AnyFabric;
