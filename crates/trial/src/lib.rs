//! One run ("trial") of a system in the simulator: a world, its nodes, clients that run a workload, injected faults,
//! and the recorded history.
//!
//! The seed determines everything that the setup leaves open: the number of clients, their carrier, their operations,
//! and when processes are paused and killed. The module `family` holds the differences between families of systems. No
//! other module of this crate depends on a particular family, except those that implement one.
//!
//! Invariant: the same setup and seed give the same history.

#![forbid(unsafe_code)]

pub mod epochs;
pub mod events;
pub mod flight;
pub mod index;
pub mod judge;
pub mod kills;
pub mod latches;
pub mod members;
pub mod sharded;
pub mod stamps;
pub mod tear;
pub mod values;

mod blocks;
mod btree;
mod configurations;
mod family;
mod guarded;
mod kv;
mod latch;
mod mishaps;
mod outages;
mod pool;
mod queue;
mod recoverers;
mod registers;
mod sessions;
mod spanning;
mod systems;
mod txn;
mod work;

pub use systems::System;

use configurations::Configurations;
use family::Family;
use farside_remote::control::Ask;
use farside_remote::{Capabilities, NodeId};
use farside_sim::checker::{Checked, Checker};
use farside_sim::clock::ProcessClock;
use farside_sim::fault::{Fault, FaultRates, Struck, Target};
use farside_sim::hardware::{INPUTS, Testbed};
use farside_sim::history::{History, OperationId, lines};
use farside_sim::memory::{Pace, Seen};
use farside_sim::network::{HostId, Network, Wire};
use farside_sim::nic::{Device, Sender, Timing};
use farside_sim::node::{Kinds, Node, Options};
use farside_sim::picture;
use farside_sim::random::Random;
use farside_sim::world::{MICROS, MILLIS, Nanos, ProcessId, SECONDS, World};
use farside_systems::latch::Scheme;
use farside_systems::system::Sizing;
use flight::{Flights, Matrix, Phases, can_strike};
use outages::Outages;
use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::rc::Rc;

/// How the chains of clients reach the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// The clients' CPUs run chains on the node's memory, as over `shm`.
    Direct,
    /// Datagrams, which may be lost, duplicated and reordered, as over `udp`.
    Datagrams,
    /// Connections, which may break, as over `tcp` and `ring`.
    Connections,
    /// Queue pairs, which may break: the node's NIC executes chains as classic verbs, and an engine serves calls.
    Verbs,
}

impl Carrier {
    /// All carriers.
    pub const ALL: [Carrier; 4] = [Carrier::Direct, Carrier::Datagrams, Carrier::Connections, Carrier::Verbs];

    /// Name of the carrier in flags and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Carrier::Direct => "direct",
            Carrier::Datagrams => "datagrams",
            Carrier::Connections => "connections",
            Carrier::Verbs => "verbs",
        }
    }

    /// Returns the carrier with this name.
    pub fn named(name: &str) -> Option<Carrier> {
        Carrier::ALL.into_iter().find(|carrier| carrier.name() == name)
    }

    /// Whether `fault` can strike clients that use this carrier.
    pub const fn can_have(self, fault: Fault) -> bool {
        match fault {
            Fault::Loss | Fault::Duplicate | Fault::Reorder => matches!(self, Carrier::Datagrams),
            Fault::Delay | Fault::Partition | Fault::OneWayPartition => !matches!(self, Carrier::Direct),
            Fault::Reset => matches!(self, Carrier::Connections | Carrier::Verbs),
            _ => true,
        }
    }

    /// Capabilities of the carrier's fabric that a system may need.
    pub const fn capabilities(self) -> Capabilities {
        match self {
            Carrier::Direct | Carrier::Datagrams | Carrier::Connections => Capabilities::SOFTWARE,
            Carrier::Verbs => Capabilities::CALLS
                .and(Capabilities::MASKED_CAS)
                .and(Capabilities::ON_CHIP_WORDS)
                .and(Capabilities::WHOLE_LINES),
        }
    }
}

/// Configuration of a trial. Fields that are `None` are drawn from the seed.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The system under trial.
    pub system: System,
    /// How clients reach the nodes.
    pub carrier: Option<Carrier>,
    /// Number of nodes. Each node has its own store, and every client uses all stores. Default: 1. If the system's
    /// stores lie on several nodes, the nodes have one store. Default: drawn from the seed.
    pub nodes: Option<u32>,
    /// Number of clients.
    pub clients: Option<u32>,
    /// Number of keys that the clients share.
    pub keys: Option<u64>,
    /// Number of operations of all clients together.
    pub operations: Option<u32>,
    /// Scheme by which clients synchronize, in systems with several ([`System::schemes`]).
    pub scheme: Option<Scheme>,
    /// Faults that may strike. Each seed draws a subset of these faults.
    pub faults: Vec<Fault>,
}

impl Setup {
    /// Creates a setup that leaves everything to the seed, with every fault.
    pub fn of(system: System) -> Setup {
        Setup {
            system,
            carrier: None,
            nodes: None,
            clients: None,
            keys: None,
            operations: None,
            scheme: None,
            faults: Fault::ALL.to_vec(),
        }
    }

    /// Carriers that a seed may draw for this setup.
    pub fn carriers(&self) -> Vec<Carrier> {
        self.carrier.map_or_else(|| self.system.carriers(), |carrier| vec![carrier])
    }
}

/// Values that a seed has drawn for a setup. These values exist for every family.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// How the clients reach the nodes.
    pub carrier: Carrier,
    /// Number of nodes; see [`Setup::nodes`]. If the nodes have one store, the number of its members: spare nodes are
    /// not counted.
    pub nodes: u32,
    /// Number of clients.
    pub clients: u32,
    /// Number of concurrent operations of each client at each node.
    pub tasks: u32,
    /// Number of keys that the clients share.
    pub keys: u64,
    /// Whether there are enough keys to fill a table.
    pub is_crowded: bool,
    /// Number of operations of all clients together.
    pub operations: u32,
    /// Scheme that the setup fixes; see [`Setup::scheme`].
    pub scheme: Option<Scheme>,
    /// Faults that may strike, a subset of [`Setup::faults`].
    pub faults: Vec<Fault>,
    /// Quota in MiB of each store.
    pub quota_mib: u64,
    /// Index of the phase within which faults strike, if any. If it is one of recoverers, faults strike within all of
    /// theirs.
    pub focus: Option<usize>,
    /// One in this many requests of the phase [`Drawn::focus`] is struck, on average.
    pub within_one_in: u64,
    /// One in this many operations is cancelled: its future is dropped at one of its awaits. None is cancelled if 0.
    pub drop_one_in: u64,
    /// Client that runs in the first node's process and dies with it, if any.
    pub resident: Option<u32>,
    /// One in this many operations triggers a fault of a process, host or store.
    pub mishap_one_in: u64,
    /// One in this many operations makes the node rebuild the store's structure; none does if 0.
    pub rebuild_one_in: u64,
    /// One in this many pauses of clients is longer than all timeouts; none is if 0. If it is not 0, two of
    /// three other pauses are longer than most leases.
    pub long_pause_one_in: u64,
    /// One in this many operations makes the node scan for leaked buffers; none does if 0.
    pub scan_one_in: u64,
}

impl Drawn {
    /// Draws all values, and creates the family's system with drawn options.
    fn new<F: Family>(setup: &Setup, random: &Random) -> (Drawn, F) {
        let carriers = setup.system.carriers();
        let carrier = carriers[random.below(carriers.len() as u64) as usize];
        let carrier = setup.carrier.unwrap_or(carrier);
        let clients = setup.clients.unwrap_or(random.between(2, 5) as u32);
        // A crowded trial has enough keys to collide and to fill a table.
        let is_crowded = random.one_in(6);
        let keys = if is_crowded { random.between(100, 300) } else { random.between(1, 8) };
        let keys = setup.keys.unwrap_or(keys);
        // Few keys get few operations: the cost of checking a key grows fast with its number of operations.
        let operations = if is_crowded { random.between(400, 900) } else { random.between(60, 240) };
        let operations = operations.min(40 + 40 * keys) as u32;
        let operations = setup.operations.unwrap_or(operations);
        // In 2 of 3 seeds, faults strike within one phase.
        let all = F::phases(setup.system).all;
        let of_clients = all.iter().filter(|phase| !phase.is_of_recoverers).count() as u64;
        // The phases of recoverers are one focus, which a third of the others do not have.
        let phases = if all.len() as u64 == of_clients { of_clients } else { of_clients + of_clients / 2 };
        let focus = Some(random.below(phases * 3 / 2)).filter(|phase| *phase < phases);
        let focus = focus.map(|phase| phase.min(of_clients));
        // A phase that follows only interruptions of another one has few requests, so more trials focus on it.
        let led_to = F::phases(setup.system).all.iter().position(|phase| phase.led_to_by.is_some());
        let focus = led_to.filter(|_| random.one_in(4)).map(|phase| phase as u64).or(focus);
        let is_rare = focus.is_some_and(|focus| F::phases(setup.system).all[focus as usize].is_rare);
        // Each seed draws a subset of the faults. If all faults struck in every trial, some would hide the effects of
        // others.
        let is_calm = random.one_in(8);
        let without_one_in = if focus.is_some() { 4 } else { 2 };
        let can_have = |fault: &Fault| {
            let within = |phase| can_strike(*fault, phase, &[carrier]);
            let is_of_some = F::SPANS || fault.is_of_logs();
            carrier.can_have(*fault) && (!is_of_some || F::phases(setup.system).all.iter().any(within))
        };
        let faults = setup.faults.iter().copied().filter(can_have);
        let faults = faults.filter(|_| !random.one_in(without_one_in) && !is_calm).collect::<Vec<_>>();
        let is_short = faults.contains(&Fault::Exhaustion);
        let mut drawn = Drawn {
            carrier,
            nodes: setup.nodes.unwrap_or_else(|| F::drawn_nodes(setup.system, random)),
            clients,
            tasks: random.between(1, F::TASKS_MAX) as u32,
            keys,
            is_crowded,
            operations,
            scheme: setup.scheme,
            faults,
            // Each size class of buffers takes a segment, and there are 41 size classes.
            quota_mib: match F::SPANS {
                true => 8,
                false if is_short => 4,
                false => 64,
            },
            focus: focus.map(|phase| phase as usize),
            within_one_in: if is_rare { random.between(1, 2) } else { random.between(3, 8) },
            drop_one_in: [0, 0, 10, 40][random.below(4) as usize],
            resident: (F::MAY_LIVE_AT_NODE && random.one_in(3)).then(|| random.below(clients.into()) as u32),
            mishap_one_in: 0,
            long_pause_one_in: 0,
            rebuild_one_in: 0,
            scan_one_in: 0,
        };
        let family = F::drawn(setup.system, &drawn, random);
        drawn.faults.retain(|fault| family.survives(*fault));
        drawn.quota_mib = family.quota_mib(&drawn).unwrap_or(drawn.quota_mib);
        drawn.mishap_one_in = [6, 20, 80][random.below(3) as usize];
        drawn.scan_one_in = [0, 0, 8, 40][random.below(4) as usize];
        drawn.rebuild_one_in = family.rebuild_one_in(random);
        drawn.long_pause_one_in = family.long_pause_one_in(random);
        (drawn, family)
    }
}

/// Outcome of a trial.
pub struct Report {
    /// Values that the seed drew for the setup.
    pub drawn: Drawn,
    /// Options that the seed drew for the system.
    pub options: Vec<Choice>,
    /// History of the clients' operations and their outcomes.
    pub record: Box<dyn Recorded>,
    /// Number of times that each fault has struck.
    pub struck: Rc<Struck>,
    /// Phases of the system's protocol.
    pub phases: &'static Phases,
    /// Number of times that each fault has struck within each of `phases`.
    pub matrix: Matrix,
    /// Numbers of memory accesses, of torn reads, and of cut writes.
    pub seen: Seen,
    /// Numbers of notable outcomes of operations.
    pub counts: Counts,
    /// Number of events of the trial's world.
    pub events: u64,
    /// Virtual duration of the trial in nanoseconds.
    pub lasted: Nanos,
    /// Numbers of events that say how the store's structure has changed, with their names; empty for most families.
    pub counters: Vec<(&'static str, u64)>,
    /// First violation that the trial itself found, without the history's checker; `None` if it found no violation.
    pub violation: Option<String>,
}

/// Option that a seed has drawn for a system.
pub struct Choice {
    /// Name of the option in JSON.
    pub name: &'static str,
    /// Value of the option in JSON.
    pub value: serde_json::Value,
    /// Name and value of the option as text, in the terms of the flags and the guide.
    pub words: String,
}

impl Choice {
    pub(crate) fn new(name: &'static str, value: impl Into<serde_json::Value>, words: String) -> Choice {
        Choice { name, value: value.into(), words }
    }
}

/// Words for how often a client's last operation is abandoned.
pub(crate) fn leaves(one_in: u64) -> String {
    match one_in {
        0 => "last of a client never".to_owned(),
        _ => format!("last of a client 1 in {one_in}"),
    }
}

/// A history of any family, with the family's checker.
pub trait Recorded {
    /// Number of operations in the history.
    fn operations(&self) -> usize;
    /// Digest of the history; see [`History::digest`].
    fn digest(&self) -> u64;
    /// Writes the history as JSON lines.
    ///
    /// # Errors
    /// Returns the errors of `out`.
    fn write(&self, out: &mut dyn io::Write) -> io::Result<()>;
    /// Property of a good history, as a sentence; see [`Checker::PROPERTY`].
    fn property(&self) -> &'static str;
    /// Checks the history with the family's checker.
    fn check(&self) -> Judgement;
}

/// Result of checking a history: the violations, the undecided parts, and a drawing.
pub struct Judgement {
    /// The violations of the family's specification, one sentence for each.
    pub violated: Vec<String>,
    /// One sentence for each part of the history that could not be decided, with the reason.
    pub undecided: Vec<String>,
    /// Drawing of the operations that show the violation, if any.
    pub window: Option<Window>,
}

/// Drawings of the operations that show a violation.
pub struct Window {
    /// The drawing as text for a terminal.
    pub text: String,
    /// The drawing as an SVG file.
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

/// Numbers of notable outcomes in a trial.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Number of sessions opened.
    pub sessions: u64,
    /// Number of operations that may or may not have been carried out.
    pub unknown: u64,
    /// Number of operations cancelled by dropping their futures.
    pub given_up: u64,
    /// Number of operations that failed because the store had no memory left.
    pub out_of_memory: u64,
    /// Number of operations that were refused, or lost before they ran.
    pub failed: u64,
    /// Number of conditional puts that conflicted.
    pub conflicts: u64,
    /// Number of tables that the last store's rebuilds have replaced.
    pub rebuilds: u64,
    /// Number of pauses of clients that were longer than all timeouts.
    pub long_pauses: u64,
    /// Number of times that a member of the store was replaced.
    pub replacements: u64,
    /// Number of losses of a node's memory after which its store lacked operations that had been answered, as the
    /// policy of its log allows.
    pub taken_back: u64,
}

/// The maximum virtual duration of a trial is the larger of this one and [`OPERATION_LASTS_MAX`] per operation. An
/// operation takes 30 ms on average if every sixth operation of a single client triggers a fault.
const LASTS_MAX: Nanos = 60 * SECONDS;
const OPERATION_LASTS_MAX: Nanos = 100 * MILLIS;

/// State shared by all parts of a trial, the same for every family.
struct Scene {
    world: World,
    network: Network,
    sites: Vec<Rc<Site>>,
    drawn: Drawn,
    struck: Rc<Struck>,
    flights: Flights,
    counts: Cell<Counts>,
    violation: RefCell<Option<String>>,
    /// Whether one store lies on all nodes, and whether it survives the loss of a minority of them.
    spans: bool,
    is_replicated: bool,
    /// Size of the store that lies on all nodes, if there is one.
    sizing: Option<Sizing>,
    /// Process of the last operator that was to create such a store.
    operator: Cell<Option<ProcessId>>,
    /// What the nodes hold of the store that lies on all of them.
    configurations: Configurations,
    outages: Outages,
    /// Largest skew of a clock in ppm, and largest error of a wall clock; see [`Family`].
    skew_ppm: u64,
    wall_error: Option<Nanos>,
    /// Number of recoverers, and whether the next one follows a dead one.
    recoverers: u32,
    is_recovering: Cell<bool>,
    /// Number of strikes that requests have ordered while no client had opened the present store.
    unopened_strikes: Cell<u64>,
    /// Number of strikes left within the phases of recoverers.
    recovery_strikes_left: Cell<u32>,
    /// Number of operations that are in progress.
    running: Cell<u32>,
    /// Number of recoverers' requests that wait for an operation.
    awaiting: Cell<u32>,
    /// Number of operations that no client has started yet.
    left: Cell<u32>,
    /// Number of pauses left that are longer than usual.
    long_pauses_left: Cell<u32>,
    /// The process of each client. `clocks` and `hosts` have each client's clock and host. Recoverers, if there are
    /// any, are after the clients and the client that reads everything at the end.
    clients: RefCell<Vec<Option<ProcessId>>>,
    clocks: RefCell<Vec<Option<ProcessClock>>>,
    hosts: Vec<HostId>,
    /// NIC of each client's host; used with [`Carrier::Verbs`].
    senders: Vec<Rc<Sender>>,
    /// Tag of the last written value. No two writes of a trial have the same tag.
    tags: Cell<u64>,
    kind: &'static str,
    /// Parameters with which a store is created. `rebuilt` draws parameters for a rebuild.
    parameters: String,
    rebuilt: Box<dyn Fn(&Random) -> String>,
    /// Judges what a site's store has kept, after its node lost its memory or crashed.
    after_loss: RefCell<Option<Rc<JudgesLoss>>>,
}

/// Judges what the store of a site has kept.
type JudgesLoss = dyn Fn(&Rc<Site>);

/// A node, the faults that may strike this node and its clients, and the node's store that clients use.
struct Site {
    index: usize,
    node: Node,
    faults: Vec<Fault>,
    /// Number of the store that clients use. A new store has a new number, and therefore a new name. In the history,
    /// the keys of a new store are new keys.
    store: Cell<u32>,
    /// Whether a client has opened the store with the number `store`, which proves that the store exists.
    is_opened: Cell<bool>,
    /// Whether the node's process was killed.
    was_killed: Cell<bool>,
    /// Number of the present contents in the history: a new store has new keys, and so has a store that has lost its
    /// last operations.
    contents: Cell<u32>,
    /// Times of the deaths of the node's processes since the contents began.
    deaths: RefCell<Vec<Nanos>>,
    /// Start and end of each period in which the node could not write logs in time.
    stalls: RefCell<Vec<[Nanos; 2]>>,
    /// Whether the node is about to be started again, since its log has failed.
    is_restarting: Cell<bool>,
}

impl Site {
    fn store_name(&self) -> String {
        name_of(self.store.get())
    }

    /// Begins another store, in place of one that is lost. It is yet to be created.
    fn begin_store(&self) {
        self.store.set(self.store.get() + 1);
        self.is_opened.set(false);
        self.begin_contents();
    }

    /// Begins new contents: the keys of the store are new keys of the history.
    fn begin_contents(&self) {
        self.contents.set(self.contents.get() + 1);
        self.deaths.borrow_mut().clear();
    }

    /// Returns a target that stands for this node and all its clients.
    fn target(&self) -> Target {
        Target::Node(self.index as u32)
    }
}

/// A trial of one family's system, with its recorded history.
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

    /// Returns the tag of a new value.
    fn next_tag(&self) -> u64 {
        let tag = self.tags.get() + 1;
        self.tags.set(tag);
        tag
    }

    /// Whether faults may have kept a node from posting free buffers in time.
    fn has_node_stood_still(&self) -> bool {
        [Fault::NodePause, Fault::NodeRestart, Fault::NodeLoss].iter().any(|&fault| self.struck.of(fault) > 0)
    }

    fn is_over(&self) -> bool {
        self.left.get() == 0
    }

    /// Whether the trial focuses on recoverers.
    fn is_about_recoverers(&self) -> bool {
        self.drawn.focus.is_some_and(|focus| self.flights.phase(focus).is_of_recoverers)
    }

    /// Numbers of the recoverers.
    fn recoverers(&self) -> Range<u32> {
        let first = self.drawn.clients + 1;
        first..first + self.recoverers
    }

    /// Host of a client. The client that reads everything at the end has that of the first client.
    fn host_of(&self, client: u32) -> HostId {
        self.hosts.get(client as usize).copied().unwrap_or(self.hosts[0])
    }

    /// Returns a random site if clients use all sites at once, and otherwise the given one.
    fn any_site<'a>(&'a self, site: &'a Rc<Site>) -> &'a Rc<Site> {
        match self.spans {
            true => &self.sites[self.world.random().below(self.sites.len() as u64) as usize],
            false => site,
        }
    }

    /// Whether the stores have logs, so that they survive the loss of a node's memory.
    fn has_logs(&self) -> bool {
        self.sites.iter().any(|site| site.node.options().log.is_some())
    }

    /// Whether the site's node may lose its memory. A store of replicas survives the loss of a minority.
    fn may_lose(&self, site: &Site) -> bool {
        !self.is_replicated || self.configurations.may_lose(self, site)
    }
}

/// Something that is counted as long as this value lives.
struct Counted<'a>(&'a Cell<u32>);

impl Counted<'_> {
    fn new(count: &Cell<u32>) -> Counted<'_> {
        count.set(count.get() + 1);
        Counted(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

fn name_of(store: u32) -> String {
    format!("s{store}")
}

/// Runs a trial. Passes the network's events to `events`, if given; this does not change the trial.
pub fn run(setup: &Setup, seed: u64, events: Option<events::Lines>) -> Report {
    setup.system.run(setup, seed, events)
}

/// Runs a trial of a system of the family `F`.
fn run_family<F: Family>(setup: &Setup, seed: u64, events: Option<events::Lines>) -> Report {
    let world = World::new(seed);
    let (drawn, family) = Drawn::new::<F>(setup, world.random());
    let (family, phases) = (Rc::new(family), F::phases(setup.system));
    let struck = Rc::new(Struck::default());
    let network = Network::new(&world, Wire { delay_ns: 2 * MICROS, jitter_ns: MICROS }, &struck);
    let at: Vec<HostId> = (0..drawn.nodes + family.spares()).map(|_| network.add_host()).collect();
    // If there are recoverers, the client that reads everything has a host of its own.
    let recoverers = family.recoverers();
    let parties = if recoverers > 0 { drawn.clients + 1 + recoverers } else { drawn.clients };
    let hosts = (0..parties).map(|_| match drawn.carrier {
        Carrier::Direct => at[0],
        _ => network.add_host(),
    });
    let hosts = hosts.collect();
    let sites = at
        .into_iter()
        .enumerate()
        .map(|(index, host)| start::<F>(&world, &network, &drawn, &*family, index, host));
    let (rebuilds, tolerated) = (Rc::clone(&family), family.tolerated(drawn.nodes));
    let scene = Rc::new(Scene {
        sites: sites.map(Rc::new).collect(),
        world: world.clone(),
        network,
        struck,
        flights: Flights::new(phases),
        counts: Cell::default(),
        violation: RefCell::new(None),
        spans: F::SPANS,
        is_replicated: F::IS_REPLICATED || tolerated > 0,
        sizing: F::SPANS.then(|| family.sizing()),
        operator: Cell::new(None),
        configurations: Configurations::new(drawn.nodes, tolerated, (drawn.nodes + family.spares()) as usize),
        outages: Outages::new(parties, drawn.nodes + family.spares()),
        skew_ppm: family.skew_ppm(),
        wall_error: family.wall_error(),
        recoverers,
        is_recovering: Cell::new(true),
        unopened_strikes: Cell::new(0),
        recovery_strikes_left: Cell::new(mishaps::RECOVERY_STRIKES_MAX),
        running: Cell::new(0),
        awaiting: Cell::new(0),
        left: Cell::new(drawn.operations),
        long_pauses_left: Cell::new(mishaps::LONG_PAUSES_MAX),
        clients: RefCell::new(vec![None; parties as usize]),
        clocks: RefCell::new(vec![None; parties as usize]),
        hosts,
        senders: (0..parties.max(drawn.clients + 1)).map(|_| Rc::new(INPUTS.sender())).collect(),
        tags: Cell::new(0),
        kind: setup.system.kind(),
        parameters: family.parameters(),
        rebuilt: Box::new(move |random| rebuilds.rebuilt(random)),
        after_loss: RefCell::new(None),
        drawn,
    });
    let struck = Rc::downgrade(&scene);
    scene.struck.observe(move |fault, target| {
        if let Some(scene) = struck.upgrade() {
            flight::note(&scene, fault, target);
        }
    });
    if let Some(events) = events {
        events::record(&scene, events);
    }
    let trial =
        Rc::new(Trial { scene: Rc::clone(&scene), family: Rc::clone(&family), history: RefCell::default() });
    let judging = Rc::downgrade(&trial);
    *scene.after_loss.borrow_mut() = Some(Rc::new(move |site: &Rc<Site>| {
        judging.upgrade().into_iter().for_each(|trial| work::after_loss(&trial, site));
    }));
    if F::SPANS {
        spanning::create(&scene);
    }
    if scene.is_replicated {
        configurations::watch(&scene);
    }
    if !F::SPANS {
        scene.sites.iter().for_each(|site| create_store(&scene, site));
    }
    (0..scene.drawn.clients).for_each(|client| work::start_client(&trial, client));
    scene.recoverers().for_each(|number| recoverers::start(&trial, number));
    mishaps::begin(&scene);
    let until = LASTS_MAX.max(u64::from(scene.drawn.operations) * OPERATION_LASTS_MAX);
    world.run_while(until, || !work::is_done(&scene));
    if !work::is_done(&scene) && scene.violation.borrow().is_none() {
        scene.blame(format!(
            "time limit reached: {} operations not started, others unfinished",
            scene.left.get()
        ));
    }
    work::read_all(&trial);
    work::audit(&trial);
    scene.count(|counts| counts.replacements = scene.configurations.replacements());
    let (events, lasted) = (world.events(), world.now());
    // The end of the world cuts writes, too.
    let seen = scene.sites.iter().map(|site| site.node.seen()).fold(Seen::default(), Seen::plus);
    world.end();
    Report {
        drawn: scene.drawn.clone(),
        options: family.options(),
        counters: family.counters(),
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

/// Starts a node. If it is the only one, all faults of the trial may strike it. If there are several, each node draws a
/// subset of the faults. The node has at least as many engines as a client has sessions.
fn start<F: Family>(
    world: &World,
    network: &Network,
    drawn: &Drawn,
    family: &F,
    index: usize,
    host: HostId,
) -> Site {
    let (random, engines) = (world.random(), family.sessions());
    let faults = drawn.faults.iter().copied().filter(|_| drawn.nodes == 1 || !random.one_in(3));
    let faults: Vec<Fault> = faults.collect();
    // One of several nodes may be slower than the others.
    let is_slow = F::SPANS && random.one_in(6);
    let first_pause = [MICROS, 20 * MICROS, MILLIS / 4][random.below(3) as usize];
    let options = Options {
        memory_bytes: match (F::IS_REPLICATED, F::SPANS) {
            (true, _) => 16 << 20,
            (false, true) => 64 << 20,
            (false, false) => 192 << 20,
        },
        pace: if is_slow { SLOW } else { Pace::CPU },
        idle_pause: [first_pause, 8 * MILLIS],
        engines: if drawn.carrier == Carrier::Direct { 0 } else { engines.max(random.between(1, 2) as u32) },
        is_reliable: matches!(drawn.carrier, Carrier::Connections | Carrier::Verbs),
        nic: (drawn.carrier == Carrier::Verbs).then(|| device(random, family.relaxed())),
        at_once_one_in: [0, 2, 8][random.below(3) as usize],
        datagram: [1200, 4096, 16 << 10][random.below(3) as usize],
        clock_ppm: skew(&faults, random, family.skew_ppm()),
        wall: family.wall_error().map(|most| wall_offset(random, most)),
        log: family.log(),
        ..Options::default()
    };
    let kinds: Kinds = Rc::new(systems::kinds);
    let node = Node::start(world, network, host, NodeId(index as u32), kinds, options);
    Site {
        index,
        node,
        faults,
        store: Cell::new(1),
        is_opened: Cell::new(false),
        was_killed: Cell::new(false),
        contents: Cell::new(1),
        deaths: RefCell::default(),
        stalls: RefCell::default(),
        is_restarting: Cell::new(false),
    }
}

/// Draws the timing of a node's NIC. Slow steps let other accesses interleave with a verb. `relaxed` says whether the
/// lines of a WRITE may land in any order, if the family has decided.
fn device(random: &Random, relaxed: Option<bool>) -> Device {
    let any = || [20, 200, 2_000, 20_000][random.below(4) as usize];
    let timing = Timing {
        link_gbit: 0, // The network of trials draws the latencies of messages.
        fetch_spread_ns: any(),
        land_spread_ns: any(),
        slot_spread_ns: any(),
        relaxed: relaxed.unwrap_or_else(|| random.one_in(4)),
        ..INPUTS.timing(Testbed::PRISM_APPLICATIONS)
    };
    Device { timing, has_masked_cas: true, has_on_chip_words: true }
}

/// Draws the skew of a clock in parts per million. A positive skew means that the clock runs faster than the world's.
/// `most` is the largest one.
fn skew(faults: &[Fault], random: &Random, most: u64) -> i64 {
    if faults.contains(&Fault::ClockSkew) { random.below(2 * most) as i64 - most as i64 } else { 0 }
}

/// Draws the error of a wall clock in nanoseconds. `most` is the largest one.
fn wall_offset(random: &Random, most: Nanos) -> i64 {
    random.below(2 * most + 1) as i64 - most as i64
}

/// Returns the clock of the next process of a client or of a recoverer.
fn clock_of_next(scene: &Scene, number: u32) -> ProcessClock {
    let random = scene.world.random();
    let skew = skew(&scene.drawn.faults, random, scene.skew_ppm);
    let clock = ProcessClock::new(&scene.world, skew, &scene.struck, Target::Client(number));
    if let Some(most) = scene.wall_error {
        clock.jump_wall(wall_offset(random, most));
    }
    clock
}

/// Makes the node create the site's next store, after the present store is lost. If the store lies on all nodes, makes
/// an operator create the next one there.
fn create_next_store(scene: &Rc<Scene>, site: &Rc<Site>) {
    if scene.spans {
        return spanning::replace(scene);
    }
    site.begin_store();
    create_store(scene, site);
}

/// Makes the node create the site's store, and repeats the request until a client has opened the store. A request can
/// fail: the node may die, or may have no space while it is still dropping the previous store.
fn create_store(scene: &Rc<Scene>, site: &Rc<Site>) {
    mishaps::mend_disk(site); // A new log needs a sound disk with space.
    site.node.ask(Ask::CreateStore {
        name: site.store_name(),
        kind: scene.kind.to_owned(),
        parameters: scene.parameters.clone(),
        quota: scene.drawn.quota_mib << 20,
    });
    let (theirs, site, store) = (Rc::clone(scene), Rc::clone(site), site.store.get());
    scene.world.at(scene.world.now() + 5 * MILLIS, move || {
        if site.store.get() == store && !site.is_opened.get() && !theirs.is_over() {
            // The node may have died before it dropped the previous stores.
            for before in 1..store {
                site.node.ask(Ask::DropStore { name: name_of(before) });
            }
            create_store(&theirs, &site);
        }
    });
}

/// Returns the fault rates of messages to and from the site's node.
fn rates(site: &Site) -> FaultRates {
    let one_in = |fault: Fault, often: u64| if site.faults.contains(&fault) { often } else { 0 };
    let typical = FaultRates::TYPICAL;
    FaultRates {
        loss_one_in: one_in(Fault::Loss, typical.loss_one_in),
        duplicate_one_in: one_in(Fault::Duplicate, typical.duplicate_one_in),
        reorder_one_in: one_in(Fault::Reorder, typical.reorder_one_in),
        delay_one_in: one_in(Fault::Delay, typical.delay_one_in),
        reset_one_in: one_in(Fault::Reset, typical.reset_one_in),
        late_ns: typical.late_ns,
    }
}

/// Speed of memory accesses by clients that run chains themselves.
const PACE: Pace = Pace::CPU;

/// Speed of memory accesses by a slow node.
const SLOW: Pace = Pace { usual_ns: MICROS, late_one_in: 2, ..Pace::CPU };

/// Usual delay, in nanoseconds, after which a client tries again to reach a node.
const AGAIN: Nanos = MILLIS;
