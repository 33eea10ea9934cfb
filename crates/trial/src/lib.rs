//! One run of a system in the simulator, by one seed: a world, a node, clients at work, what goes wrong meanwhile, and
//! what was seen.
//!
//! Everything that is not asked for is drawn from the seed: how many clients there are and how they reach the node,
//! what they ask, when processes are stopped and killed. `family` is what differs between families of systems;
//! nothing else here knows them. Invariant: the same setup and seed give the same history.

#![forbid(unsafe_code)]

pub mod events;
pub mod flight;
pub mod judge;
pub mod kills;
pub mod values;

mod family;
mod kv;
mod mishaps;
mod queue;
mod registers;
mod systems;
mod work;

pub use systems::System;

use family::Family;
use farside_remote::NodeId;
use farside_remote::control::Ask;
use farside_sim::checker::{Checked, Checker};
use farside_sim::clock::ProcessClock;
use farside_sim::fault::{Fault, Struck, Weather, Whom};
use farside_sim::history::{History, OperationId, lines};
use farside_sim::memory::{Pace, Seen};
use farside_sim::network::{HostId, Network, Wire};
use farside_sim::node::{Kinds, Node, Options};
use farside_sim::picture;
use farside_sim::random::Random;
use farside_sim::world::{MICROS, MILLIS, Nanos, ProcessId, SECONDS, World};
use flight::{Flights, Matrix, Phases};
use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

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

    /// The carrier of that name.
    pub fn named(name: &str) -> Option<Carrier> {
        Carrier::ALL.into_iter().find(|carrier| carrier.name() == name)
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
    /// How many nodes, each with a store of its own that every client uses; one if not said.
    pub nodes: Option<u32>,
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
            nodes: None,
            clients: None,
            keys: None,
            operations: None,
            faults: Fault::ALL.to_vec(),
        }
    }

    /// The carriers that a seed may draw.
    pub fn carriers(&self) -> Vec<Carrier> {
        self.carrier.map_or(Carrier::ALL.to_vec(), |carrier| vec![carrier])
    }
}

/// What a seed has made of a setup, whatever the family.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// How clients reach nodes.
    pub carrier: Carrier,
    /// See [`Setup::nodes`].
    pub nodes: u32,
    /// How many clients there are, and how many operations each has under way at once at a node.
    pub clients: u32,
    /// See [`Drawn::clients`].
    pub tasks: u32,
    /// How many keys they share.
    pub keys: u64,
    /// Whether these are so many that they fill a table.
    pub is_crowded: bool,
    /// How many operations all of them carry out together.
    pub operations: u32,
    /// Of [`Setup::faults`], those that may strike.
    pub faults: Vec<Fault>,
    /// A store's quota in MiB.
    pub quota_mib: u64,
    /// The phase within which faults are to strike, and one request of it in so many that one does.
    pub focus: Option<usize>,
    /// See [`Drawn::focus`].
    pub within_one_in: u64,
    /// One operation in so many is given up: its future is dropped at one of its awaits; none if 0.
    pub drop_one_in: u64,
    /// The client that lives in the process of the first node, and dies with it.
    pub resident: Option<u32>,
    /// One operation in so many brings something about that happens to processes, hosts or stores.
    pub mishap_one_in: u64,
    /// One operation in so many has the node replace the store's structure; none if 0.
    pub rebuild_one_in: u64,
    /// One operation in so many has the node look for lost buffers; none if 0.
    pub scan_one_in: u64,
}

impl Drawn {
    /// Draws all of it, and the family's options.
    fn new<F: Family>(setup: &Setup, random: &Random) -> (Drawn, F) {
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
        // Two of three seeds have faults strike within one phase.
        let phases = F::phases(setup.system).all.len() as u64;
        let focus = Some(random.below(phases * 3 / 2)).filter(|phase| *phase < phases);
        let is_rare = focus.is_some_and(|focus| F::phases(setup.system).all[focus as usize].is_rare);
        // Each seed has some of the faults: one that always strikes hides what others do.
        let is_calm = random.one_in(8);
        let without_one_in = if focus.is_some() { 4 } else { 2 };
        let faults = setup.faults.iter().copied().filter(|fault| carrier.can_have(*fault));
        let faults = faults.filter(|_| !random.one_in(without_one_in) && !is_calm).collect::<Vec<_>>();
        let is_short = faults.contains(&Fault::Exhaustion);
        let mut drawn = Drawn {
            carrier,
            nodes: setup.nodes.unwrap_or(1),
            clients,
            tasks: random.between(1, 3) as u32,
            keys,
            is_crowded,
            operations,
            faults,
            // Each size of buffers takes a segment: there are 41.
            quota_mib: if is_short { 4 } else { 64 },
            focus: focus.map(|phase| phase as usize),
            within_one_in: if is_rare { random.between(1, 2) } else { random.between(3, 8) },
            drop_one_in: [0, 0, 10, 40][random.below(4) as usize],
            resident: (F::MAY_LIVE_AT_NODE && random.one_in(3)).then(|| random.below(clients.into()) as u32),
            mishap_one_in: 0,
            rebuild_one_in: 0,
            scan_one_in: 0,
        };
        let family = F::drawn(setup.system, &drawn, random);
        drawn.mishap_one_in = [6, 20, 80][random.below(3) as usize];
        drawn.scan_one_in = [0, 0, 8, 40][random.below(4) as usize];
        drawn.rebuild_one_in = family.rebuild_one_in(random);
        (drawn, family)
    }
}

/// What came of a trial.
pub struct Report {
    /// What the seed made of the setup.
    pub drawn: Drawn,
    /// The options that it drew for the system.
    pub options: Vec<Choice>,
    /// What clients asked and were answered.
    pub record: Box<dyn Recorded>,
    /// How often each fault has struck.
    pub struck: Rc<Struck>,
    /// The phases of the system's protocol, and how often each fault has struck within each.
    pub phases: &'static Phases,
    /// See [`Report::phases`].
    pub matrix: Matrix,
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

/// An option that a seed has drawn for a system.
pub struct Choice {
    /// Its name in JSON.
    pub name: &'static str,
    /// Its value in JSON.
    pub value: serde_json::Value,
    /// Both, as flags and the guide name them.
    pub words: String,
}

impl Choice {
    pub(crate) fn new(name: &'static str, value: impl Into<serde_json::Value>, words: String) -> Choice {
        Choice { name, value: value.into(), words }
    }
}

/// A history in the words of any family, with its checker.
pub trait Recorded {
    /// How many operations it has.
    fn operations(&self) -> usize;
    /// See [`History::digest`].
    fn digest(&self) -> u64;
    /// Writes it as JSON lines.
    ///
    /// # Errors
    /// Those of `out`.
    fn write(&self, out: &mut dyn io::Write) -> io::Result<()>;
    /// See [`Checker::PROPERTY`].
    fn property(&self) -> &'static str;
    /// Judges it.
    fn check(&self) -> Judgement;
}

/// What a checker says of a history.
pub struct Judgement {
    /// What is wrong, a sentence each.
    pub violated: Vec<String>,
    /// What nobody knows, a sentence each.
    pub undecided: Vec<String>,
    /// The operations that show what is wrong.
    pub window: Option<Window>,
}

/// The operations that show what is wrong, drawn.
pub struct Window {
    /// For a terminal.
    pub text: String,
    /// As a file of its own.
    pub svg: String,
}

struct Record<F: Family> {
    family: Rc<F>,
    history: History<F::Ask>,
}

impl<F: Family> Recorded for Record<F> {
    fn operations(&self) -> usize {
        self.history.operations().len()
    }

    fn digest(&self) -> u64 {
        self.history.digest()
    }

    fn write(&self, out: &mut dyn io::Write) -> io::Result<()> {
        lines::write(&self.history, out)
    }

    fn property(&self) -> &'static str {
        F::Checker::PROPERTY
    }

    fn check(&self) -> Judgement {
        let Checked { violated, undecided, window } = self.family.checker().check(&self.history);
        let window = window.map(|window| Window { text: picture::text(&window), svg: picture::svg(&window) });
        Judgement { violated, undecided, window }
    }
}

/// How often what is worth knowing has happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Sessions that were opened.
    pub sessions: u64,
    /// Operations of which nobody knows whether they were carried out.
    pub unknown: u64,
    /// Operations that were given up: their futures were dropped.
    pub given_up: u64,
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

/// What all of a trial's parts share that is the same for every family.
struct Scene {
    world: World,
    network: Network,
    sites: Vec<Rc<Site>>,
    drawn: Drawn,
    struck: Rc<Struck>,
    flights: Flights,
    counts: Cell<Counts>,
    violation: RefCell<Option<String>>,
    /// Operations that are still to be begun.
    left: Cell<u32>,
    /// The process of each client, its clock, and where it is.
    clients: RefCell<Vec<Option<ProcessId>>>,
    clocks: RefCell<Vec<Option<ProcessClock>>>,
    hosts: Vec<HostId>,
    /// Values that were written; each is written once.
    tags: Cell<u64>,
    kind: &'static str,
    /// The parameters of a store, and those of another structure for it.
    parameters: String,
    rebuilt: Box<dyn Fn(&Random) -> String>,
}

/// A node, what may go wrong with it, and the store on it that clients use.
struct Site {
    index: usize,
    node: Node,
    faults: Vec<Fault>,
    /// The store that clients are to use: stores have different names, so that each is another history.
    store: Cell<u32>,
    /// Whether a client has opened that store, so that it is there.
    is_opened: Cell<bool>,
}

impl Site {
    fn store_name(&self) -> String {
        name_of(self.store.get())
    }

    /// Everyone at this node.
    fn whom(&self) -> Whom {
        Whom::Node(self.index as u32)
    }
}

/// A trial of a system of one family.
struct Trial<F: Family> {
    scene: Rc<Scene>,
    family: Rc<F>,
    history: RefCell<History<F::Ask>>,
}

impl<F: Family> Trial<F> {
    fn returned(&self, id: OperationId, outcome: family::OutcomeOf<F>) {
        self.history.borrow_mut().returned(id, outcome, self.scene.world.now());
    }
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

    /// The number of a value that nobody has written.
    fn next_tag(&self) -> u64 {
        let tag = self.tags.get() + 1;
        self.tags.set(tag);
        tag
    }

    /// Whether a node may have been too slow to hand out memory.
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

/// Runs a trial. Its network's events go to `events`, if that is given, with no effect on the run.
pub fn run(setup: &Setup, seed: u64, events: Option<events::Lines>) -> Report {
    setup.system.run(setup, seed, events)
}

/// Runs a trial of a system of that family.
fn run_family<F: Family>(setup: &Setup, seed: u64, events: Option<events::Lines>) -> Report {
    let world = World::new(seed);
    let (drawn, family) = Drawn::new::<F>(setup, world.random());
    let (family, phases) = (Rc::new(family), F::phases(setup.system));
    let struck = Rc::new(Struck::default());
    let network = Network::new(&world, Wire { delay_ns: 2 * MICROS, jitter_ns: MICROS }, &struck);
    let at: Vec<HostId> = (0..drawn.nodes).map(|_| network.add_host()).collect();
    let hosts = (0..drawn.clients).map(|_| match drawn.carrier {
        Carrier::Direct => at[0],
        _ => network.add_host(),
    });
    let hosts = hosts.collect();
    let sites = at.into_iter().enumerate().map(|(index, host)| start(&world, &network, &drawn, index, host));
    let rebuilds = Rc::clone(&family);
    let scene = Rc::new(Scene {
        sites: sites.map(Rc::new).collect(),
        world: world.clone(),
        network,
        struck,
        flights: Flights::new(phases),
        counts: Cell::default(),
        violation: RefCell::new(None),
        left: Cell::new(drawn.operations),
        clients: RefCell::new(vec![None; drawn.clients as usize]),
        clocks: RefCell::new(vec![None; drawn.clients as usize]),
        hosts,
        tags: Cell::new(0),
        kind: setup.system.name(),
        parameters: family.parameters(),
        rebuilt: Box::new(move |random| rebuilds.rebuilt(random)),
        drawn,
    });
    let struck = Rc::downgrade(&scene);
    scene.struck.observe(move |fault, whom| {
        if let Some(scene) = struck.upgrade() {
            flight::note(&scene, fault, whom);
        }
    });
    if let Some(events) = events {
        events::record(&scene, events);
    }
    let trial =
        Rc::new(Trial { scene: Rc::clone(&scene), family: Rc::clone(&family), history: RefCell::default() });
    scene.sites.iter().for_each(|site| create_store(&scene, site));
    (0..scene.drawn.clients).for_each(|client| work::employ(&trial, client));
    mishaps::begin(&scene);
    let until = LASTS_MAX.max(u64::from(scene.drawn.operations) * OPERATION_LASTS_MAX);
    world.run_while(until, || !work::is_done(&scene));
    if !work::is_done(&scene) && scene.violation.borrow().is_none() {
        scene.blame(format!("{} operations were never begun, or never ended", scene.left.get()));
    }
    work::look_at_all(&trial);
    work::audit(&trial);
    let (events, lasted) = (world.events(), world.now());
    world.end();
    let seen = scene.sites.iter().map(|site| site.node.seen()).fold(Seen::default(), |all, seen| Seen {
        accesses: all.accesses + seen.accesses,
        torn_reads: all.torn_reads + seen.torn_reads,
    });
    Report {
        drawn: scene.drawn.clone(),
        options: family.options(),
        record: Box::new(Record { family, history: trial.history.take() }),
        struck: Rc::clone(&scene.struck),
        phases,
        matrix: scene.flights.matrix(),
        seen,
        counts: scene.counts.get(),
        events,
        lasted,
        violation: scene.violation.take(),
    }
}

/// Starts a node. The only one has all faults of the trial; of several, each has some.
fn start(world: &World, network: &Network, drawn: &Drawn, index: usize, host: HostId) -> Site {
    let random = world.random();
    let faults = drawn.faults.iter().copied().filter(|_| drawn.nodes == 1 || !random.one_in(3));
    let faults: Vec<Fault> = faults.collect();
    let first_look = [MICROS, 20 * MICROS, MILLIS / 4][random.below(3) as usize];
    let options = Options {
        memory_bytes: 192 << 20,
        look: [first_look, 8 * MILLIS],
        engines: if drawn.carrier == Carrier::Direct { 0 } else { random.between(1, 2) as u32 },
        is_reliable: drawn.carrier == Carrier::Connections,
        at_once_one_in: [0, 2, 8][random.below(3) as usize],
        datagram: [1200, 4096, 16 << 10][random.below(3) as usize],
        clock_ppm: skew(&faults, random),
        ..Options::default()
    };
    let kinds: Kinds = Rc::new(systems::kinds);
    let node = Node::start(world, network, host, NodeId(index as u32), kinds, options);
    Site { index, node, faults, store: Cell::new(1), is_opened: Cell::new(false) }
}

/// How many millionths faster a clock runs than the world's.
fn skew(faults: &[Fault], random: &Random) -> i64 {
    if faults.contains(&Fault::ClockSkew) { random.below(400_000) as i64 - 200_000 } else { 0 }
}

/// The store that clients use is gone; has the node make the one that they are to use next.
fn create_next_store(scene: &Rc<Scene>, site: &Rc<Site>) {
    site.store.set(site.store.get() + 1);
    site.is_opened.set(false);
    create_store(scene, site);
}

/// Has the node make the store, and asks it again until a client has found it: it may die before it is made, or have
/// no room while the one before is still being dropped.
fn create_store(scene: &Rc<Scene>, site: &Rc<Site>) {
    site.node.ask(Ask::CreateStore {
        name: site.store_name(),
        kind: scene.kind.to_owned(),
        parameters: scene.parameters.clone(),
        quota: scene.drawn.quota_mib << 20,
    });
    let (theirs, site, store) = (Rc::clone(scene), Rc::clone(site), site.store.get());
    scene.world.at(scene.world.now() + 5 * MILLIS, move || {
        if site.store.get() == store && !site.is_opened.get() && !theirs.is_over() {
            // It may have died before it dropped those.
            for before in 1..store {
                site.node.ask(Ask::DropStore { name: name_of(before) });
            }
            create_store(&theirs, &site);
        }
    });
}

/// The weather at a node.
fn weather(site: &Site) -> Weather {
    let one_in = |fault: Fault, often: u64| if site.faults.contains(&fault) { often } else { 0 };
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
